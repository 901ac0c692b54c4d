"""`weft probe`: measure this machine. In: nothing. Out: a table, and a cluster file that `--cluster` takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import options
from weft.cli.output import output
from weft.errors import UsageError
from weft.report.tables import Table
from weft.units import format_bytes, format_flops, format_rate, format_seconds

if TYPE_CHECKING:
    from weft.cluster.cluster import Cluster


def probe(
    target: options.OutFile = None,
    full: Annotated[bool, typer.Option("--full", help="More sizes and ranks: longer, and more exact.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even where a stored result fits.")] = False,
    as_json: options.Json = False,
) -> None:
    """Measure this machine.

    Matrix products, memory, and collectives between processes. The result is kept in the user's cache and is what `--cluster here` means.

    \b
    Example:
      weft probe -o cluster.toml
    """
    with output(as_json) as out:
        from weft.cluster.probe import probe as measure

        with out.working("measuring this machine (once, some seconds)"):
            cluster = measure(not full, fresh=fresh or full)
        if target is not None:
            try:
                target.write_text(cluster.to_toml())
            except OSError as error:
                raise UsageError(f"cannot write {target}: {error.strerror}; choose a folder that can be written to") from None
            out.message(f"written to {target}; use it with --cluster {target}")
        for table in cluster_tables(cluster):
            out.table(table)
        out.answer(asdict(cluster))


def cluster_tables(cluster: Cluster) -> tuple[Table, ...]:
    """The machine in words: what it is, what a rank gets, and what collectives cost."""
    device = cluster.device
    facts = [
        ("device", f"{cluster.num_devices} x {device.name} ({device.kind})"),
        ("memory", f"{format_bytes(device.memory_bytes)} each"),
    ]
    facts += [
        (
            f"link {level.name}",
            f"{level.size} units, {format_rate(level.link.bandwidth_bytes_per_s)}, {format_seconds(level.link.latency_s)}",
        )
        for level in cluster.levels
    ]
    tables = [Table(f"Machine {cluster.name}", ("", ""), tuple(facts))]
    if cluster.speeds:
        rows = [
            (str(s.ranks), str(s.threads), precision, f"{format_flops(flops)}/s", format_rate(s.memory_bandwidth_bytes_per_s))
            for s in cluster.speeds
            for precision, flops in s.flops
        ]
        columns = ("ranks at once", "threads each", "precision", "matrix products, each", "memory, each")
        tables.append(Table("What a rank gets (measured)", columns, tuple(rows), right=(0, 1, 3, 4)))
    if cluster.tables:
        points = [
            (f"{t.collective}, {t.ranks} ranks", format_bytes(size_bytes), format_seconds(time_s), format_rate(size_bytes / time_s))
            for t in cluster.tables
            for size_bytes, time_s in t.points
        ]
        tables.append(Table("Collectives (measured)", ("", "size", "time", "rate"), tuple(points), right=(1, 2, 3)))
    return tuple(tables)
