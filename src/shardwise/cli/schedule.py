"""`shardwise schedule`: draw, prove and time a pipeline schedule, given by name and sizes or by a file of actions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output, write_file
from shardwise.errors import ProgramError, UsageError
from shardwise.model.gc_pause import gc_paused

if TYPE_CHECKING:
    from shardwise.plan.ir.program import Program
    from shardwise.simulate.summary import Summary

_NAME = "sequential, gpipe, 1f1b, interleaved, breadth-first, zb-h1, zb-h2, zb-v, chimera, gems-mast or gems-master; or a file of actions."
_TARGET = "Write the picture (.svg), the actions (.txt, for check) or the timeline (.json, for compare)."
SUFFIXES = (".svg", ".txt", ".json")
Times = Annotated[str, typer.Option("--times", metavar="f=1,b=2[,w=1][,c=0]", help="Time of each kind of action.")]
_CHUNKS = "Stages of each rank, of interleaved and breadth-first; by default 2."
Chunks = Annotated[int, typer.Option("--chunks", min=1, metavar="V", help="Stages of each rank, of interleaved and breadth-first.")]
DEFAULT_TIMES = "f=1,b=2"


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help=_NAME, show_default=False)],
    stages: Annotated[int | None, typer.Option("--stages", metavar="P", help="Pipeline stages: ranks.", show_default=False)] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", metavar="M", help="Microbatches a step.", show_default=False)
    ] = None,
    times: Times = DEFAULT_TIMES,
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, metavar="V", help=_CHUNKS, show_default=False)] = None,
    target: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help=_TARGET, show_default=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Draw, prove and time a schedule.

    In --times, f is a forward, b a backward (its input part where w, the weights' part, is given) and c a transfer. Each is the time of all
    stages of a rank together, so a stage of interleaved or zb-v takes its share. The bubble is the idle share of all
    ranks' time.

    \b
    Example:
      shardwise schedule 1f1b --stages 4 --microbatches 8 --times f=1,b=2
      shardwise schedule zb-v --stages 4 --microbatches 8 --times f=1,b=1,w=1 -o picture.svg
    """
    with open_output(as_json) as out, gc_paused():
        from shardwise.plan.ir.custom_schedule import is_schedule_file  # here: the command starts fast
        from shardwise.schedules.diagnosis import prove_program
        from shardwise.simulate.summary import MicrobatchTimes, summarize_schedule

        unit = MicrobatchTimes.parse(times)
        if target is not None and target.suffix not in SUFFIXES:
            raise UsageError(f"{target} is none of the kinds that a schedule is written as; end it in {', '.join(SUFFIXES)}")
        if is_schedule_file(name):
            options_of_names = (("--stages", stages), ("--microbatches", microbatches), ("--chunks", chunks))
            if unused := [option for option, value in options_of_names if value is not None]:
                raise UsageError(f"{name} is a file, which says its sizes itself; leave {' and '.join(unused)} out")
            program, written, each = _schedule_from_file(name)
        else:
            program, each = _schedule_by_name(name, stages, microbatches, chunks)
            written = program
        try:
            prove_program(program, written=written)
        except ProgramError as error:
            out.answer(schedule_record(program, None, str(error)))
            out.message(str(error))
            raise typer.Exit(ProgramError.exit_code) from None
        summary = summarize_schedule(program, unit, each)
        if not out.to_json:
            _draw_schedule(program, summary, out)
        if target is not None:
            _write(program, summary, target)
            out.message(f"written to {target}")
        out.answer(schedule_record(program, summary))


def _schedule_from_file(name: str) -> tuple[Program, Program, int]:
    """Return (program, program as written, stages of each rank) of a file."""
    from shardwise.cli.check import read_program  # here: the command starts fast

    program, written = read_program(Path(name))
    if not program.num_stages:
        raise UsageError(f"{name} has no computes, so it is no schedule; shardwise check proves collectives")
    return program, written, program.num_stages // program.num_ranks if program.num_stages % program.num_ranks == 0 else 1


def _schedule_by_name(name: str, stages: int | None, microbatches: int | None, chunks: int | None) -> tuple[Program, int]:
    """Return (program, stages of each rank) of a schedule by name."""
    from shardwise.plan.ir.schedule_sizes import SCHEDULES, chunks_of  # here: the command starts fast

    if stages is None or microbatches is None:
        missing = " and ".join(o for o, v in (("--stages", stages), ("--microbatches", microbatches)) if v is None)
        raise UsageError(f"{name} needs {missing}; for example shardwise schedule {name} --stages 4 --microbatches 8")
    each = chunks_of(name, chunks or 2)
    if chunks not in (None, each) and name in SCHEDULES:
        raise UsageError(f"{name} has {each} stage{'s' * (each > 1)} a rank, not {chunks}; use interleaved, or leave --chunks out")
    return build_program(name, stages, microbatches, each), each


_MAX_FORWARDS = 200_000  # most forwards of one schedule: more take minutes and gigabytes


def build_program(name: str, ranks: int, microbatches: int, chunks: int) -> Program:
    """Build the program of a schedule on `ranks` ranks with `chunks` stages each."""
    from shardwise import schedules  # here: the command starts fast

    if ranks * chunks * microbatches > _MAX_FORWARDS:
        raise UsageError(
            f"{name} of {ranks * chunks} stages and {microbatches} microbatches has {ranks * chunks * microbatches:,} forwards, each "
            f"of which is proven and timed; use a product of at most {_MAX_FORWARDS:,}: the bubble of more microbatches follows from those"
        )
    return schedules.build(name, ranks * chunks, microbatches, None, False, chunks)


def schedule_record(program: Program, summary: Summary | None, reason: str = "") -> dict[str, object]:
    """Return the JSON object of one schedule."""
    return {
        "schedule": program.name,
        "proven": summary is not None,
        "reason": reason,
        "time": summary.time if summary else None,
        "bubble": summary.bubble if summary else None,
        "bubble_in_window": summary.bubble_in_window if summary else None,
        "utilisation": 1 - summary.bubble if summary else None,
        "peak_in_flight": list(summary.peak_in_flight) if summary else [],
        "weights_held": list(summary.weights_held) if summary else [],
        "actions": program.num_actions,
    }


def schedule_headline(program: Program, summary: Summary) -> str:
    """Return the line above the picture."""
    from shardwise.units import format_percent  # here: the command starts fast

    microbatches = f"{len(program.microbatches)} microbatch{'es' * (len(program.microbatches) != 1)}"
    ranks = f"{program.num_ranks} rank{'s' * (program.num_ranks != 1)}"
    window = f", in its window {format_percent(summary.bubble_in_window)}" if starts_and_ends_late(summary) else ""
    return f"{program.name}, {ranks}, {microbatches}: time {summary.time:g}, bubble {format_percent(summary.bubble)}{window}"


def starts_and_ends_late(summary: Summary) -> bool:
    """Return whether ranks start and end one after another, so that their own windows have a smaller bubble."""
    return summary.bubble - summary.bubble_in_window > 1e-6


def rank_columns(summary: Summary) -> list[tuple[str, list[str]]]:
    """Return columns for the picture: peak microbatches in flight and stages' weights of each rank."""
    return [("in flight", [f"{n:g}" for n in summary.peak_in_flight]), ("weights", [f"{n:g}" for n in summary.weights_held])]


def _draw_schedule(program: Program, summary: Summary, out: CommandOutput) -> None:
    from shardwise.report.gantt import gantt_text  # here: the command starts fast

    out.picture(
        gantt_text(
            summary.timeline, rank_columns=rank_columns(summary), headline=schedule_headline(program, summary), time_text="{:g}".format
        )
    )
    count = len(program.microbatches)
    holds = f"every gradient holds each of {count} microbatches once; " if any(program.wants) else "it runs to its end; "
    out.text(f"proven: {holds}at most {max(summary.peak_in_flight, default=0):g} in flight")
    if starts_and_ends_late(summary):
        out.text("ranks start and end one after another: a rank's window is from its first compute to its last action, as in Qi et al.")


def without_transfers(program: Program) -> Program:
    """Return the computes alone, to edit and run on any model, if completing them restores the same transfers; else the program."""
    from dataclasses import replace  # here: the command starts fast

    from shardwise.plan.ir.program import Recv, Send
    from shardwise.schedules.lower import complete_with_transfers

    rows = tuple(tuple(a for a in row if not isinstance(a, (Send, Recv))) for row in program.actions)
    computes = replace(program, actions=rows)
    return computes if complete_with_transfers(computes) == program else program


def _write(program: Program, summary: Summary, target: Path) -> None:
    if target.suffix == ".svg":
        from shardwise.report.gantt import gantt_svg  # here: the command starts fast

        text = (
            gantt_svg(
                summary.timeline, rank_columns=rank_columns(summary), headline=schedule_headline(program, summary), time_text="{:g}".format
            )
            + "\n"
        )
    else:
        text = f"{without_transfers(program)}\n" if target.suffix == ".txt" else summary.timeline.to_json()
    write_file(target, text)
