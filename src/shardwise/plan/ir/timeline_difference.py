"""Differences of two timelines of one program, action by action: which took longer, and which ended later.

For example a simulated and a measured timeline. Each counts from its own start. A measurement has a rank for every device, a simulation one
for every pipeline rank; since the pipeline is the outermost axis, the first device of each pipeline rank represents it. Not modelled: why
an action came later.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardwise.plan.ir.timeline import COMPUTE_LANE, Span, Timeline


@dataclass(frozen=True, slots=True)
class ActionDifference:
    """One compute of one rank in two timelines, seconds from each timeline's start."""

    rank: int
    name: str
    start_a_s: float
    end_a_s: float
    start_b_s: float
    end_b_s: float

    @property
    def added_duration_s(self) -> float:
        """Seconds by which it takes longer in b."""
        return (self.end_b_s - self.start_b_s) - (self.end_a_s - self.start_a_s)

    @property
    def delay_s(self) -> float:
        """Seconds by which it ends later in b."""
        return self.end_b_s - self.end_a_s


@dataclass(frozen=True, slots=True)
class TimelineDifference:
    """Two timelines compared. `actions`: what both have, in a's order; `only_a`, `only_b`: how many computes the other lacks."""

    total_a_s: float
    total_b_s: float
    actions: tuple[ActionDifference, ...]
    only_a: int
    only_b: int

    @property
    def relative_difference(self) -> float:
        """Return b's total over a's, less one: 0.1 where b takes 10 % longer; nan where a takes no time."""
        return self.total_b_s / self.total_a_s - 1 if self.total_a_s else float("nan")

    def largest(self, count: int) -> tuple[ActionDifference, ...]:
        """Return the actions whose durations differ most, most first."""
        return tuple(sorted(self.actions, key=lambda d: -abs(d.added_duration_s))[:count])


def compare_by_action(a: Timeline, b: Timeline) -> TimelineDifference:
    """Match the computes of two timelines by rank and name; the n-th of a name with the n-th.

    >>> a = Timeline("a", 1, (Span(0, "compute", "0F0", 0.0, 1.0, "F"), Span(0, "compute", "0B0", 1.0, 3.0, "B")))
    >>> b = Timeline("b", 1, (Span(0, "compute", "0F0", 5.0, 6.0, "F"), Span(0, "compute", "0B0", 6.5, 9.0, "B")))
    >>> found = compare_by_action(a, b)
    >>> round(found.relative_difference, 2), [(d.name, d.added_duration_s, d.delay_s) for d in found.largest(1)]
    (0.33, [('0B0', 0.5, 1.0)])

    Of two numbers of ranks of which neither divides the other no action is matched.
    """
    num_ranks = min(a.num_ranks, b.num_ranks)
    if not num_ranks or max(a.num_ranks, b.num_ranks) % num_ranks:
        return TimelineDifference(a.total_s, b.total_s, (), _count_computes(a), _count_computes(b))
    spans_a, spans_b = _number_computes(a, num_ranks), _number_computes(b, num_ranks)
    common = [key for key in spans_a if key in spans_b]
    actions = tuple(
        ActionDifference(
            key[0],
            key[1],
            spans_a[key].start_s - a.start_s,
            spans_a[key].end_s - a.start_s,
            spans_b[key].start_s - b.start_s,
            spans_b[key].end_s - b.start_s,
        )
        for key in common
    )
    return TimelineDifference(a.total_s, b.total_s, actions, len(spans_a) - len(common), len(spans_b) - len(common))


def _count_computes(timeline: Timeline) -> int:
    return sum(span.lane == COMPUTE_LANE for span in timeline.spans)


def _number_computes(timeline: Timeline, num_ranks: int) -> dict[tuple[int, str, int], Span]:
    """Return (pipeline rank, name, number of earlier computes of that name) -> span."""
    devices = timeline.num_ranks // num_ranks
    counts: dict[tuple[int, str], int] = defaultdict(int)
    spans: dict[tuple[int, str, int], Span] = {}
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE and span.rank % devices == 0:
            key = (span.rank // devices, span.name)
            spans[(*key, counts[key])] = span
            counts[key] += 1
    return spans
