"""Straggler detection: which ranks the others wait for, and for what share of the run.

A rank works while it waits in no collective; working longer than the median of its peers (ranks of the same pipeline stage) costs all
others that time. A window lies between two agreements of the ranks, about half a second. Not modelled: devices that run ahead of their
host, on which no rank waits in a collective; stale updates.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from shardwise.plan.ir.axis import PIPELINE
from shardwise.plan.ir.mesh import Mesh
from shardwise.units import format_percent
from shardwise.world.world import World

MIN_SHARE = 0.05  # share of the run that is worth reporting
MIN_WINDOWS = 6
_UNITS = 1e6


class StragglerMonitor:
    """The waiting times of one run, the same on every rank."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self._world, self._window_start_s, self._waited_before_s = world, time.monotonic(), world.recorder.waited_s
        self._peer_groups = ranks_by_stage(world.num_ranks, mesh)
        self.lost_s = [0.0] * world.num_ranks
        self.total_s, self._windows, self._reported = 0.0, 0, set[int]()

    def measure_window(self) -> list[int]:
        """Return this rank's input to the all-reduce (max) that ends a window: its microseconds, then microseconds of work by rank."""
        now, waited_s = time.monotonic(), self._world.recorder.waited_s
        window_s, idle_s = now - self._window_start_s, waited_s - self._waited_before_s
        self._window_start_s, self._waited_before_s = now, waited_s
        work = max(0, round(_UNITS * (window_s - idle_s)))
        return [round(_UNITS * window_s), *(work if rank == self._world.rank else 0 for rank in range(self._world.num_ranks))]

    def add_window(self, agreed: Sequence[int]) -> str:
        """Add an all-reduced window. Return a sentence if a straggler is newly found, else an empty string."""
        window_s, *work_s = (n / _UNITS for n in agreed)
        rank, lost_s = slowest_rank(work_s, self._peer_groups)
        self.total_s += window_s
        self._windows += 1
        self.lost_s[rank] += min(lost_s, window_s)
        if self._windows < MIN_WINDOWS or rank in self._reported or rank not in self.wait_shares():
            return ""
        self._reported.add(rank)
        share = format_percent(self.wait_shares()[rank])
        return f"the others wait for rank {rank}, {share} of the time so far: it does the same work as its peers, and takes longer"

    def wait_shares(self) -> dict[int, float]:
        """Share of the run for which the others waited, by rank, for ranks above the reporting threshold."""
        if self._world.device.type != "cpu" or not self.total_s:
            return {}
        return {rank: lost / self.total_s for rank, lost in enumerate(self.lost_s) if lost > MIN_SHARE * self.total_s}


def ranks_by_stage(num_ranks: int, mesh: Mesh) -> list[list[int]]:
    """Return the groups of ranks of a pipeline stage, which do the same work, of two ranks or more."""
    by_stage: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        by_stage.setdefault(mesh.coordinates(rank).get(PIPELINE, 0), []).append(rank)
    return [ranks for ranks in by_stage.values() if len(ranks) > 1]


def slowest_rank(work_s: Sequence[float], peer_groups: Sequence[Sequence[int]]) -> tuple[int, float]:
    """Return (the rank that works longest compared with its peers, seconds above their lower median).

    >>> slowest_rank([1.0, 3.0, 1.0, 1.5], [[0, 1], [2, 3]])
    (1, 2.0)
    """
    excess = [(work_s[rank] - sorted(work_s[r] for r in ranks)[(len(ranks) - 1) // 2], rank) for ranks in peer_groups for rank in ranks]
    lost_s, rank = max(excess, default=(0.0, 0))
    return rank, lost_s
