"""Tables of a cluster: its devices and links, the measured speed of a rank, and the measured times of collectives."""

from __future__ import annotations

from shardwise.cluster.cluster import Cluster
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_flops, format_rate, format_seconds


def cluster_tables(cluster: Cluster) -> tuple[TextTable, ...]:
    """Tabulate a cluster's devices and links, a rank's measured speed, and measured collectives."""
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
    tables = [TextTable(f"Machine {cluster.name}", ("", ""), tuple(facts))]
    if cluster.speeds:
        rows = [
            (str(s.ranks), str(s.threads), precision, f"{format_flops(flops)}/s", format_rate(s.memory_bandwidth_bytes_per_s))
            for s in cluster.speeds
            for precision, flops in s.flops
        ]
        columns = ("ranks at once", "threads each", "precision", "matrix products, each", "memory, each")
        tables.append(TextTable("What a rank gets (measured)", columns, tuple(rows), right=(0, 1, 3, 4)))
    if cluster.tables:
        points = [
            (f"{t.collective}, {t.ranks} ranks", format_bytes(size_bytes), format_seconds(time_s), format_rate(size_bytes / time_s))
            for t in cluster.tables
            for size_bytes, time_s in t.points
        ]
        tables.append(TextTable("Collectives (measured)", ("", "size", "time", "rate"), tuple(points), right=(1, 2, 3)))
    return tuple(tables)
