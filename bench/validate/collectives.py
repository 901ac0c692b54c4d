"""All-reduce times: the catalogue's constants, fitted, and held out by cluster size.

Fitted are the constants of `Protocols` and the part of the links' bandwidth that large messages reach. One-rank rows (a local copy)
are no collective and are left out; of the two timings, in place and out of place, their geometric mean counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.validate.fit import fit
from bench.validate.rows import Row, table
from shardwise.cluster.cluster import Cluster
from shardwise.cost.calibration.efficiency import ProtocolCost, Protocols, protocols_named
from shardwise.cost.network.network import RankGroup, collective_s

MIB = 2.0**20
Point = tuple[int, float, float]  # ranks, bytes, seconds
NODE = ("node_ll", "node_simple")
NETWORK = ("net_ll", "net_ll128", "net_tree", "net_ring")


def a100(folder: Path) -> list[Point]:
    """8 B to 16 GiB on 2 to 128 A100, 8 a node."""
    rows = table(folder, "allreduce_a100_azure_nd.csv")
    both = [(int(r["gpus"]), float(r["size_B"]), float(r["oop_time_us"]), float(r["ip_time_us"])) for r in rows]
    return [(n, size, 1e-6 * (a * b) ** 0.5) for n, size, a, b in both if n > 1]


def h100(folder: Path) -> list[Point]:
    """8 B to 8 GiB on 2 x 8 H100."""
    rows = table(folder, "allreduce_h100_a3mega_16gpu.csv")
    return [(int(r["gpus"]), float(r["size_B"]), 1e-6 * (float(r["oop_us"]) * float(r["ip_us"])) ** 0.5) for r in rows]


def cluster_of(name: str, ranks: int) -> Cluster:
    return Cluster.parse(f"{max(1, -(-ranks // 8))}x{name}")


def constants(rules: Protocols, cluster: Cluster, lines: Iterable[str]) -> dict[str, float]:
    """The constants of some of the rules by name, and the efficiency of the links that they are for."""
    found = {f"{line}.{key}": max(getattr(getattr(rules, line), key), 1e-3) for line in lines for key in ("start", "hop", "rate")}
    node, network = (level.link.efficiency for level in cluster.levels)
    return {"node": node, "network": network, **{k: v for k, v in found.items() if k not in ("node_simple.rate", "net_ring.rate")}}


def rules_of(rules: Protocols, found: dict[str, float]) -> Protocols:
    changed: dict[str, ProtocolCost] = {}
    for key, value in found.items():
        line, _, part = key.partition(".")
        if part:
            changed[line] = replace(changed.get(line, getattr(rules, line)), **{part: value})
    return replace(rules, **changed)


def with_links(cluster: Cluster, node: float, network: float) -> Cluster:
    levels = [replace(level, link=replace(level.link, efficiency=e)) for level, e in zip(cluster.levels, (node, network), strict=False)]
    return replace(cluster, levels=tuple(levels))


def predicted(name: str, rules: Protocols, found: dict[str, float], points: list[Point]) -> list[float]:
    rules = rules_of(rules, found)
    clusters = {n: with_links(cluster_of(name, n), found["node"], found["network"]) for n in {p[0] for p in points}}
    return [collective_s(clusters[n], "all_reduce", size, RankGroup(n), rules) for n, size, _ in points]


def fitted(name: str, points: list[Point], start: dict[str, float], only: tuple[str, ...] = ()) -> dict[str, float]:
    """`start` with the constants `only` (all by default) fitted to the points."""
    rules = protocols_named(cluster_of(name, 16).levels[1].link.protocol)
    moving = {k: v for k, v in start.items() if not only or k in only}
    measured = np.array([p[2] for p in points])
    caps = {"node": (0.05, 1.0), "network": (0.05, 1.0)}
    done = fit(
        lambda c: np.log(np.array(predicted(name, rules, {**start, **c}, points)) / measured), moving, limit=0.15, rounds=25, bounds=caps
    )
    return {**start, **done}


def errors(name: str, found: dict[str, float], points: list[Point]) -> list[float]:
    rules = protocols_named(cluster_of(name, 16).levels[1].link.protocol)
    return [p / m - 1 for p, (_, _, m) in zip(predicted(name, rules, found, points), points, strict=True)]


def rows(folder: Path) -> list[Row]:
    """A100: as frozen, and with every cluster size held out. H100: as frozen, and every second size in bytes held out."""
    found: list[Row] = []
    points = a100(folder)
    start = constants(protocols_named("nccl"), cluster_of("dgx-a100-40", 16), (*NODE, *NETWORK))
    held: list[tuple[Point, float]] = []
    for ranks in sorted({p[0] for p in points}):
        out = [p for p in points if p[0] == ranks]
        held += zip(out, errors("dgx-a100-40", fitted("dgx-a100-40", [p for p in points if p[0] != ranks], start), out), strict=True)
    found += _both("all-reduce, A100, Azure ND", "frozen", points, errors("dgx-a100-40", start, points))
    found += _both("all-reduce, A100, Azure ND", "leave one cluster size out", [p for p, _ in held], [e for _, e in held])
    points = h100(folder)
    start = constants(protocols_named("tcpxo"), cluster_of("a3-megagpu-8g", 16), NETWORK)
    found += _both("all-reduce, H100, a3-mega", "frozen", points, errors("a3-megagpu-8g", start, points))
    held = []
    for part in (0, 1):
        out = points[part::2]
        held += zip(out, errors("a3-megagpu-8g", fitted("a3-megagpu-8g", points[1 - part :: 2], start, H100), out), strict=True)
    found += _both("all-reduce, H100, a3-mega", "every second size held out", [p for p, _ in held], [e for _, e in held])
    return found


# With two nodes alone a start and a hop cannot be told apart: the hop keeps the A100's proportion to the start.
H100 = ("network", "net_ll.start", "net_ll.rate", "net_ll128.start", "net_ll128.rate", "net_tree.start")


def _both(name: str, protocol: str, points: list[Point], errors: list[float]) -> list[Row]:
    large = [e for (_, size, _), e in zip(points, errors, strict=True) if size > MIB]
    return [Row.of(f"{name}, above 1 MiB", protocol, large), Row.of(f"{name}, all sizes", protocol, errors)]


def refit(folder: Path) -> str:
    """The fitted constants, to be written into the catalogue by hand."""
    lines = []
    start = constants(protocols_named("nccl"), cluster_of("dgx-a100-40", 16), (*NODE, *NETWORK))
    lines += [f"nccl {k} = {v:.4g}" for k, v in fitted("dgx-a100-40", a100(folder), start).items()]
    start = constants(protocols_named("tcpxo"), cluster_of("a3-megagpu-8g", 16), NETWORK)
    lines += [f"tcpxo {k} = {v:.4g}" for k, v in fitted("a3-megagpu-8g", h100(folder), start, H100).items()]
    return "\n".join(lines)
