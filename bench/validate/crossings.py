"""Where one all-reduce algorithm takes over from another: in the cost model, and in measured curves. In: the tables of nccl-tests.

The measured times do not say which algorithm ran. But one algorithm's time is a start and a rate, so that its local exponent (the slope of
the logarithm of time against that of bytes) only rises with size, from 0 to 1. Where it falls, another algorithm with a later start and
a higher rate has taken over: a fall at a size is a switch between its two neighbours. Neighbours are a factor of two apart, so that a
switch is known to within that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log, sqrt
from pathlib import Path

from bench.validate.collectives import MIB, Point, a100, cluster_of, h100
from shardwise.cost.network.network import RankGroup, library_times

LEAST_FALL = 0.04  # smaller ones are repeat noise: in and out of place differ by 1 %, which is 0.015 in an exponent
MACHINES = {"dgx-a100-40": a100, "a3-megagpu-8g": h100}
FROM, TO = 1 << 10, 1 << 34


@dataclass(frozen=True, slots=True)
class Crossing:
    """The model's change from `before` to `after` at `size` bytes, and the nearest fall of the measured exponent: where, by how much."""

    machine: str
    ranks: int
    before: str
    after: str
    size: float
    measured: float
    fall: float

    @property
    def factor(self) -> float:
        """How far apart the two are, above 1."""
        return max(self.size / self.measured, self.measured / self.size)


def falls(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """(bytes, by how much the exponent falls there) for every fall of at least LEAST_FALL; `points`: (bytes, seconds), ascending.

    >>> one, other = (lambda s: 10 + s), (lambda s: 100 + s / 10)
    >>> [(size, round(fall, 1)) for size, fall in falls([(2.0**k, min(one(2.0**k), other(2.0**k))) for k in range(16)])]
    [(64.0, 0.2), (128.0, 0.5)]
    """
    slopes = [(a, b, log(tb / ta) / log(b / a)) for (a, ta), (b, tb) in pairwise(points)]
    found = [(before[1], before[2] - after[2]) for before, after in pairwise(slopes)]
    return [(size, fall) for size, fall in found if fall >= LEAST_FALL]


def changes(machine: str, ranks: int) -> list[tuple[str, str, float]]:
    """(before, after, bytes) of every change of the model's fastest, by halving."""
    cluster, group = cluster_of(machine, ranks), RankGroup(ranks)

    def best(size: float) -> str:
        lines = library_times(cluster, size, group)
        return min(lines, key=lines.__getitem__)

    found, size = [], float(FROM)
    while size < TO:
        here, there = best(size), best(2 * size)
        if here != there:
            low, high = size, 2 * size
            while high / low > 1.01:
                middle = sqrt(low * high)
                low, high = (middle, high) if best(middle) == here else (low, middle)
            found.append((here, best(high), high))
        size *= 2
    return found


def crossings(folder: Path) -> list[Crossing]:
    """Every change of the model's fastest over nodes, beside the nearest switch in the measured curve."""
    found = []
    for machine, read in MACHINES.items():
        points = read(folder)
        for ranks in sorted({n for n, _, _ in points if n > 8}):
            known = falls(curve(points, ranks))
            for before, after, size in changes(machine, ranks):
                found.append(Crossing(machine, ranks, before, after, size, *nearest(known, size)))
    return found


def nearest(known: Sequence[tuple[float, float]], size: float) -> tuple[float, float]:
    """The fall that is the smallest factor away from a size."""
    return min(known, key=lambda one: abs(log(one[0] / size)))


def curve(points: Sequence[Point], ranks: int) -> list[tuple[float, float]]:
    """(bytes, seconds) of one number of ranks, ascending."""
    return sorted((size, seconds) for n, size, seconds in points if n == ranks)


def table(found: Sequence[Crossing]) -> str:
    """Markdown."""
    lines = ["| machine | GPUs | from | to | the model's crossing | nearest switch measured | factor |", "|---|---|---|---|---|---|---|"]
    for one in found:
        lines.append(
            f"| {one.machine} | {one.ranks} | {one.before} | {one.after} | {_size(one.size)} | {_size(one.measured)} | {one.factor:.1f} |"
        )
    return "\n".join(lines)


def _size(size: float) -> str:
    return f"{size / MIB:.3g} MiB" if size >= MIB else f"{size / 1024:.3g} KiB"


if __name__ == "__main__":
    p = argparse.ArgumentParser(description="where all-reduce algorithms change, in the model and as measured", allow_abbrev=False)
    p.add_argument("--data", type=Path, required=True, help="the folder of the measured tables")
    print(table(crossings(p.parse_args(sys.argv[1:]).data)))
