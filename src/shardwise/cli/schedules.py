"""`shardwise schedules`: compare all pipeline schedules for given sizes and times, in a table."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import open_output
from shardwise.cli.schedule import DEFAULT_TIMES, Chunks, Times, build_program, schedule_record
from shardwise.errors import UsageError
from shardwise.model.gc_pause import gc_paused

SLOW_FORWARDS = 1 << 14  # forwards from which a schedule takes seconds, so that progress messages are printed
_COLUMNS = ("schedule", "time", "bubble", "in its window", "in flight", "weights", "")


def schedules(
    stages: Annotated[int, typer.Option("--stages", metavar="P", help="Pipeline stages: ranks.", show_default=False)],
    microbatches: Annotated[int, typer.Option("--microbatches", metavar="M", help="Microbatches a step.", show_default=False)],
    times: Times = DEFAULT_TIMES,
    chunks: Chunks = 2,
    as_json: options.Json = False,
) -> None:
    """Compare all schedules.

    The bubble is the idle share of all ranks' time; in its window: counted from a rank's first compute to its last action. In flight:
    microbatches that the fullest rank holds at once. Weights: of how many stages. Both in shares of one rank. --times is that of the verb
    schedule.

    \b
    Example:
      shardwise schedules --stages 4 --microbatches 8 --times f=1,b=1,w=1
    """
    with open_output(as_json) as out, gc_paused():
        from shardwise.plan.ir.check import check  # here: the command starts fast
        from shardwise.plan.ir.schedule_sizes import SCHEDULES, chunks_of
        from shardwise.report.tables import TextTable
        from shardwise.simulate.summary import MicrobatchTimes, summarize_schedule
        from shardwise.units import format_percent

        if stages < 1 or microbatches < 1:
            raise UsageError(f"{stages} stages and {microbatches} microbatches; there must be at least 1 of each")
        unit = MicrobatchTimes.parse(times)
        records: list[dict[str, object]] = []
        rows: list[tuple[str, ...]] = []
        for number, name in enumerate(SCHEDULES, 1):
            if stages * microbatches >= SLOW_FORWARDS:
                out.message(f"{name}, {number} of {len(SCHEDULES)}")
            each = chunks_of(name, chunks)
            try:
                program = build_program(name, stages, microbatches, each)
            except UsageError as error:
                records.append({"schedule": name, "proven": False, "reason": str(error)})
                rows.append((name, *[""] * 5, str(error).partition(", not")[0].removeprefix(f"{name} ")))
                continue
            check(program)
            summary = summarize_schedule(program, unit, each)
            records.append(schedule_record(program, summary))
            rows.append(
                (
                    name,
                    f"{summary.time:g}",
                    format_percent(summary.bubble),
                    format_percent(summary.bubble_in_window),
                    f"{max(summary.peak_in_flight):g}",
                    f"{max(summary.weights_held):g}",
                    "",
                )
            )
        timed = [(i, float(row[1])) for i, row in enumerate(rows) if row[1]]
        fastest = tuple(i for i, time in timed if time == min(t for _, t in timed))
        note = f"stages: {stages}, microbatches: {microbatches}, {times}; all proven, the fastest in bold"
        out.table(TextTable("Schedules", _COLUMNS, tuple(rows), right=(1, 2, 3, 4, 5), marked=fastest, note=note))
        out.answer({"stages": stages, "microbatches": microbatches, "schedules": records})
