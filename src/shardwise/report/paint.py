"""Colours of a schedule's Gantt chart, with shades that distinguish replicas and stages of a rank.

Blue, orange and green are distinguishable for colour-blind readers, and by lightness in grey print. A second replica,
and every second stage of a rank that has several, is lighter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.plan.ir.timeline import COMPUTE_LANE, Span, Timeline

# kind -> (fill, ink) in both shades
COLOURS_BY_KIND = {
    "F": (("#2f6db3", "#ffffff"), ("#9dc3ea", "#0d2b4b")),
    "B": (("#e0701a", "#2a1000"), ("#f8c08c", "#4a2000")),
    "I": (("#e0701a", "#2a1000"), ("#f8c08c", "#4a2000")),
    "W": (("#3d9a78", "#04281b"), ("#a9dcc6", "#0b3d2a")),
    "R": (("#a3699c", "#ffffff"), ("#dcbad7", "#41203d")),
}
OTHER = (("#9d9da1", "#1b1b1d"), ("#c9c9cc", "#1b1b1d"))
# Activities concurrent with the compute, by lane.
STRIPS = {"send": "#6b6b72", "collective": "#8a6bb8", "offload": "#9c6b3f", "load": "#c9a26b", "step": "#5b8a8a"}
WORDS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights", "R": "recompute"}
STRIP_WORDS = {
    "send": "sending", "collective": "gathering, reducing", "offload": "to the host", "load": "from the host",
    "step": "gradients, optimizer, the rest",
}  # fmt: skip
ACTION = re.compile(r"(\d+)([FBIWR])(\d+)")


@dataclass(frozen=True, slots=True)
class SpanShades:
    """Lighter shades of computes, and their meaning.

    `replica`: microbatch -> index of the replica; `order`: (rank, stage) -> index among the stages of its rank.
    """

    replica: dict[int, int]
    order: dict[tuple[int, int], int]
    num_replicas: int

    @property
    def meaning(self) -> str:
        """Text of the legend; empty where nothing is lighter."""
        if self.num_replicas > 1:
            return "lighter: replica 2"
        return "lighter: every second stage of a rank" if any(self.order.values()) else ""

    @property
    def shows_stage(self) -> bool:
        """Return whether labels need the stage: ranks have more stages than one per replica."""
        stages = len(self.order)
        ranks = len({rank for rank, _ in self.order})
        return stages > ranks * max(1, self.num_replicas)

    def shade_of(self, span: Span) -> int:
        """Return 0, or 1 for the lighter shade."""
        match = ACTION.fullmatch(span.name)
        if not match:
            return 0
        if self.num_replicas > 1:
            return self.replica.get(int(match[3]), 0) % 2
        return self.order.get((span.rank, int(match[1])), 0) % 2


def span_shades(timeline: Timeline) -> SpanShades:
    """Derive shades; microbatches whose stages are on the same ranks belong to one replica."""
    computes = [(s.rank, int(f[1]), int(f[3])) for s in timeline.spans if s.lane == COMPUTE_LANE and (f := ACTION.fullmatch(s.name))]
    rank_of: dict[int, dict[int, int]] = {}  # microbatch -> stage -> rank
    of_rank: dict[int, set[int]] = {}
    for rank, stage, microbatch in computes:
        rank_of.setdefault(microbatch, {})[stage] = rank
        of_rank.setdefault(rank, set()).add(stage)
    order = {(rank, stage): i for rank, stages in of_rank.items() for i, stage in enumerate(sorted(stages))}
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    replica = {m: numbers.setdefault(tuple(sorted(rank_of[m].items())), len(numbers)) for m in sorted(rank_of)}
    return SpanShades(replica, order, len(numbers))


def span_colours(kind: str, shade: int) -> tuple[str, str]:
    """Return (fill, ink) of a kind of span."""
    return COLOURS_BY_KIND.get(kind, OTHER)[shade]
