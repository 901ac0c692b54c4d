"""`weft schedules`: compare all pipeline schedules for given sizes and times, in a table."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.cli import options
from weft.cli.output import output
from weft.cli.schedule import DEFAULT_TIMES, Chunks, Times, build_of, record
from weft.errors import UsageError
from weft.model.collector import uncollected

LONG = 1 << 14  # forwards from which a schedule takes seconds, so that progress messages are printed
_COLUMNS = ("schedule", "time", "bubble", "utilisation", "in flight", "weights", "")


def schedules(
    stages: Annotated[int, typer.Option("--stages", metavar="P", help="Pipeline stages: ranks.", show_default=False)],
    microbatches: Annotated[int, typer.Option("--microbatches", metavar="M", help="Microbatches a step.", show_default=False)],
    times: Times = DEFAULT_TIMES,
    chunks: Chunks = 2,
    as_json: options.Json = False,
) -> None:
    """Compare all schedules.

    In flight: microbatches that the fullest rank holds at once. Weights: of how many stages. Both in shares of one rank. --times is
    that of the verb schedule.

    \b
    Example:
      weft schedules --stages 4 --microbatches 8 --times f=1,b=1,w=1
    """
    with output(as_json) as out, uncollected():
        from weft.plan.check import check
        from weft.plan.schedule_sizes import SCHEDULES, chunks_of
        from weft.report.tables import Table
        from weft.simulate.summary import Times, summarize
        from weft.units import format_percent

        if stages < 1 or microbatches < 1:
            raise UsageError(f"{stages} stages and {microbatches} microbatches; there must be at least 1 of each")
        unit = Times.parse(times)
        records: list[dict[str, object]] = []
        rows: list[tuple[str, ...]] = []
        for number, name in enumerate(SCHEDULES, 1):
            if stages * microbatches >= LONG:
                out.message(f"{name}, {number} of {len(SCHEDULES)}")
            each = chunks_of(name, chunks)
            try:
                program = build_of(name, stages, microbatches, each)
            except UsageError as error:
                records.append({"schedule": name, "proven": False, "reason": str(error)})
                rows.append((name, *[""] * 5, str(error).partition(", not")[0].removeprefix(f"{name} ")))
                continue
            check(program)
            summary = summarize(program, unit, each)
            records.append(record(program, summary))
            rows.append(
                (
                    name,
                    f"{summary.time:g}",
                    format_percent(summary.bubble),
                    format_percent(summary.utilisation),
                    f"{max(summary.peak_in_flight):g}",
                    f"{max(summary.weights_held):g}",
                    "",
                )
            )
        timed = [(i, float(row[1])) for i, row in enumerate(rows) if row[1]]
        fastest = tuple(i for i, time in timed if time == min(t for _, t in timed))
        note = f"stages: {stages}, microbatches: {microbatches}, {times}; all proven, the fastest in bold"
        out.table(Table("Schedules", _COLUMNS, tuple(rows), right=(1, 2, 3, 4, 5), marked=fastest, note=note))
        out.answer({"stages": stages, "microbatches": microbatches, "schedules": records})
