"""`shardwise check`: prove or refute a schedule or a collective in a file; a refutation names the rank, the step and the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output
from shardwise.errors import ProgramError, UsageError
from shardwise.model.gc_pause import gc_paused

if TYPE_CHECKING:
    from shardwise.plan.ir.program import Program

_FILE = (
    "Actions of each rank, a line a rank: `rank 0: 0F0 x(0,1,0)>1 ...`, or computes alone: `0F0 0F1 0B0 0B1`. "
    "Of a collective a line says which: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast."
)


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=_FILE, show_default=False)],
    rendezvous: Annotated[
        bool, typer.Option("--rendezvous", help="Also where a send waits for its receive, as NCCL on one stream may.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Prove or refute a schedule or a collective.

    Exit 4 where it is refuted, 2 where its text cannot be read. Proven: it runs to its end, nothing is read that is not there, and every
    gradient holds each microbatch exactly once, every sum each
    rank's summand once. A file that names no transfers gets them first. The verb schedule writes such files with -o.

    \b
    Example:
      shardwise check mine.txt
      shardwise check examples/two_rings.txt
    """
    with open_output(as_json) as out, gc_paused():
        from shardwise.plan.ir.custom_schedule import refuse_program  # here: the command starts fast
        from shardwise.schedules.diagnosis import prove_program

        try:
            program, written = read_program(file, rendezvous)
            prove_program(program, rendezvous, written)
            _require_postcondition(program)
        except ProgramError as error:
            reason = f"{file}: {str(error).removeprefix(f'{file.name}: ')}"
            out.answer({"proven": False, "reason": reason})
            out.message(f"refuted: {reason}" if error.exit_code == ProgramError.exit_code else reason)
            raise typer.Exit(error.exit_code) from None
        completed = program != written
        out.text(f"proven: {_describe_program(program, completed)}")
        untrainable = refuse_program(written) if program.num_stages else ""
        if untrainable:
            out.text(f"it is no schedule to train with: {untrainable}")
        out.answer(
            {"proven": True, "reason": "", "name": program.name, "ranks": program.num_ranks, "actions": program.num_actions,
             "microbatches": len(program.microbatches), "completed": completed, "untrainable": untrainable}
        )  # fmt: skip


def read_program(file: Path, rendezvous: bool = False) -> tuple[Program, Program]:
    """Return a file's program completed with transfers, where it names none, and as written; `rendezvous`: sends wait for their receives.

    Raises:
        UsageError: a file that cannot be read. ProgramTextError: text that is no program. ProgramError: transfers cannot be added.
    """
    from shardwise.plan.ir.custom_schedule import read_actions  # here: the command starts fast
    from shardwise.plan.ir.program import Program
    from shardwise.schedules.diagnosis import diagnose_error
    from shardwise.schedules.lower import complete_with_transfers

    program = Program.parse(read_actions(file))
    program = program if program.name != "program" else replace(program, name=file.name)  # a program's text may leave its name out
    try:
        completed = complete_with_transfers(program, rendezvous)
    except ProgramError as error:
        raise diagnose_error(program, error) from None
    return completed, program


def read_collective(file: Path) -> tuple[str, Program]:
    """Return (name of the collective, program) of a file of one.

    Raises:
        UsageError: a file that cannot be read, or is a schedule. ProgramError: it is refuted.
    """
    from shardwise.plan.ir.custom_schedule import read_actions  # here: the command starts fast
    from shardwise.plan.ir.text import COLLECTIVE_NAMES
    from shardwise.schedules.diagnosis import prove_program

    program, written = read_program(file)
    if program.num_stages:
        raise UsageError(f"{file} has computes, so it is a schedule; shardwise schedule {file} draws it")
    prove_program(program, written=written)
    _require_postcondition(program)
    words = {line.split()[0] for line in read_actions(file).splitlines() if line.split()}
    return next((name for name in COLLECTIVE_NAMES if name in words), "collective"), program


def _require_postcondition(program: Program) -> None:
    if not program.num_stages and not any(program.wants):
        raise ProgramError(
            f"{program.name} does not say what must hold at the end; write a line `all_reduce` (or another collective), or "
            "`wants 0: chunk(0)=0,1` for each rank"
        )


def _describe_traffic(program: Program) -> str:
    """Describe the longest chain of messages of a collective, and what its ranks send as a fraction of the tensor."""
    from shardwise.simulate.messages import Wire, deliver_messages, num_steps  # here: the command starts fast

    if not program.num_actions or not program.boundary_values:
        return ""
    sent = deliver_messages(program, lambda _: 1 / len(program.boundary_values), lambda *_: Wire(0.0, 1.0)).sent_bytes
    most, mean = max(sent), sum(sent) / len(sent)
    return f", {num_steps(program)} messages one after another; a rank sends at most {most:.2f} of the tensor, {mean:.2f} in the mean"


def _describe_program(program: Program, completed: bool) -> str:
    count = len(program.microbatches)
    text = f"{program.num_ranks} rank{'s' * (program.num_ranks != 1)}, {program.num_actions} actions"
    if program.num_stages and any(program.wants):
        text += f"; every gradient holds each of {count} microbatch{'es' * (count != 1)} once"
    elif program.num_stages:
        text += "; it runs to its end (it has no backward)"
    else:
        text += f"; every rank ends with what it wants{_describe_traffic(program)}"
    return f"{text}{'; transfers were added' if completed else ''}"
