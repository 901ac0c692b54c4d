"""`weft schedule`: draw, prove and time a pipeline schedule by name. In: sizes and times. Out: a picture and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import output
from weft.errors import ProgramError, UsageError

DEFAULT_TIMES = "f=1,b=2"


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME", help="sequential, gpipe or 1f1b.", show_default=False)],
    stages: Annotated[int, typer.Option("--stages", metavar="P", help="Pipeline stages.", show_default=False)],
    microbatches: Annotated[int, typer.Option("--microbatches", metavar="M", help="Microbatches a step.", show_default=False)],
    times: Annotated[str, typer.Option("--times", metavar="f=1,b=2[,w=1][,c=0]", help="Time of each kind of action.")] = DEFAULT_TIMES,
    as_json: options.Json = False,
) -> None:
    """Draw, prove and time a schedule.

    In --times f is a forward, b a whole backward, or its input part where w (the weights' part) is given, and c a transfer.

    \b
    Example:
      weft schedule 1f1b --stages 4 --microbatches 8 --times f=1,b=2
    """
    with output(as_json) as out:
        from weft.plan.check import check
        from weft.plan.program import Op
        from weft.report.gantt import gantt
        from weft.schedules import build
        from weft.simulate.clock import simulate
        from weft.simulate.memory import in_flight

        unit = parse_times(times)
        backward = unit["b"] + unit.get("w", 0.0)
        seconds = {Op.F: unit["f"], Op.B: backward, Op.I: unit["b"] if "w" in unit else backward / 2, Op.W: unit.get("w", backward / 2)}
        program = build(name, stages, microbatches)
        proven, reason = True, ""
        try:
            check(program)
        except ProgramError as error:
            proven, reason = False, str(error)
        timeline = simulate(program, lambda action: seconds[action.op], lambda *_: unit.get("c", 0.0)) if proven else None
        held = in_flight(program) if proven else ()
        if timeline is not None:
            out.text(gantt(timeline))
            out.text(f"proven: every gradient holds each of {microbatches} microbatches once; at most {max(held)} in flight")
        out.answer(
            {
                "proven": proven,
                "reason": reason,
                "time": timeline.total_s if timeline else None,
                "bubble": timeline.bubble if timeline else None,
                "utilisation": 1 - timeline.bubble if timeline else None,
                "peak_in_flight": list(held),
                "actions": sum(len(row) for row in program.actions),
            }
        )
        if not proven:
            out.message(reason)
            raise typer.Exit(ProgramError.exit_code)


def parse_times(text: str) -> Mapping[str, float]:
    """`f=1,b=2` as numbers.

    Raises:
        UsageError: an unknown letter, no number, or f or b missing.
    """
    found: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        key, eq, value = word.partition("=")
        if not eq or key not in "fbwc" or len(key) != 1:
            raise UsageError(f"--times word {word!r} is not f=, b=, w= or c= with a number; for example {DEFAULT_TIMES}")
        try:
            found[key] = float(value)
        except ValueError:
            raise UsageError(f"--times {word}: {value!r} is not a number; for example {key}=1.5") from None
        if not 0 <= found[key] < float("inf"):
            raise UsageError(f"--times {word}: a time is finite and not negative")
    if missing := [key for key in "fb" if key not in found]:
        raise UsageError(f"--times {text!r} lacks {' and '.join(missing)}; for example {DEFAULT_TIMES}")
    return found
