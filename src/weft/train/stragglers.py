"""Which ranks the others wait for, and how much of the run that takes. In: seconds that every rank was at work. Out: shares, sentences.

A rank is at work when it waits in no collective. What one does more than the median of those with the same work (of its pipeline
stage) all others lose. A window is what lies between two moments at which ranks agree, about half a second. Not modelled: devices that run
ahead of their host, on which nobody waits in a collective; updates that come late.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from weft.plan.axis import PIPELINE
from weft.plan.mesh import Mesh
from weft.units import format_percent
from weft.world.world import World

SHARE = 0.05  # of the run that is worth a sentence
WINDOWS = 6
_UNITS = 1e6


class Stragglers:
    """The account of one run, the same on every rank."""

    def __init__(self, world: World, mesh: Mesh) -> None:
        self._world, self._before_s, self._before_waited_s = world, time.monotonic(), world.recorder.waited_s
        self._teams = teams_of(world.num_ranks, mesh)
        self.lost_s = [0.0] * world.num_ranks
        self.seconds, self._windows, self._named = 0.0, 0, set[int]()

    def mark(self) -> list[int]:
        """What this rank adds to what all agree on, a maximum: (microseconds, microseconds at work, by rank). A window ends."""
        now, waited_s = time.monotonic(), self._world.recorder.waited_s
        window_s, idle_s = now - self._before_s, waited_s - self._before_waited_s
        self._before_s, self._before_waited_s = now, waited_s
        work = max(0, round(_UNITS * (window_s - idle_s)))
        return [round(_UNITS * window_s), *(work if rank == self._world.rank else 0 for rank in range(self._world.num_ranks))]

    def add(self, agreed: Sequence[int]) -> str:
        """Take what all have agreed on; returns a sentence where there is news."""
        window_s, *work_s = (n / _UNITS for n in agreed)
        rank, lost_s = slowest(work_s, self._teams)
        self.seconds += window_s
        self._windows += 1
        self.lost_s[rank] += min(lost_s, window_s)
        if self._windows < WINDOWS or rank in self._named or rank not in self.shares():
            return ""
        self._named.add(rank)
        share = format_percent(self.shares()[rank])
        return f"the others wait for rank {rank}, {share} of the time so far: it does the same work as its like, and takes longer"

    def shares(self) -> dict[int, float]:
        """By rank, the part of the run for which the others waited for it, where that is worth a word."""
        if self._world.device.type != "cpu" or not self.seconds:
            return {}
        return {rank: lost / self.seconds for rank, lost in enumerate(self.lost_s) if lost > SHARE * self.seconds}


def teams_of(num_ranks: int, mesh: Mesh) -> list[list[int]]:
    """The ranks that do the same work, several each."""
    by_stage: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        by_stage.setdefault(mesh.coordinates(rank).get(PIPELINE, 0), []).append(rank)
    return [ranks for ranks in by_stage.values() if len(ranks) > 1]


def slowest(work_s: Sequence[float], teams: Sequence[Sequence[int]]) -> tuple[int, float]:
    """(the rank that works longest of its like, by how many seconds longer than their lower median).

    >>> slowest([1.0, 3.0, 1.0, 1.5], [[0, 1], [2, 3]])
    (1, 2.0)
    """
    excess = [(work_s[rank] - sorted(work_s[r] for r in ranks)[(len(ranks) - 1) // 2], rank) for ranks in teams for rank in ranks]
    lost_s, rank = max(excess, default=(0.0, 0))
    return rank, lost_s
