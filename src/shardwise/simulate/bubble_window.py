"""Pipeline bubbles as counted in the zero-bubble papers: within each rank's own window. In: a `Timeline`. Out: seconds, and a fraction.

A rank that ends early may go on to its update and its next step, and one that starts late did so before; so the window is the time
from a rank's first compute to its last action. It is the whole time for schedules whose first rank starts first and ends last, and less for
those that shift their ranks against one another (zb-h2, zb-v).
"""

from __future__ import annotations

from shardwise.plan.ir.timeline import COMPUTE_LANE, Timeline


def window_s(timeline: Timeline, rank: int) -> float:
    """Seconds from a rank's first compute to the end of its last action."""
    return _windows_s(timeline)[rank]


def bubble_in_window(timeline: Timeline) -> float:
    """Return the mean idle fraction of the ranks within the longest rank's window, 0 to 1.

    Qi et al., ICLR 2024, section 5.3: 1 - m(F + I + W) / longest, where all ranks have equal work.
    """
    longest_s = max(_windows_s(timeline), default=0.0)
    if not longest_s:
        return 0.0
    return 1 - sum(timeline.busy_s(rank) for rank in range(timeline.num_ranks)) / (timeline.num_ranks * longest_s)


def _windows_s(timeline: Timeline) -> list[float]:
    starts, ends = [float("inf")] * timeline.num_ranks, [float("-inf")] * timeline.num_ranks
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE:
            starts[span.rank] = min(starts[span.rank], span.start_s)
        if span.lane != "send":  # a send occupies the link, after its rank has ended
            ends[span.rank] = max(ends[span.rank], span.end_s)
    return [end - start if start <= end else 0.0 for start, end in zip(starts, ends, strict=True)]
