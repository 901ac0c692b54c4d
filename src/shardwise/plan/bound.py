"""Describe in words how far a plan may be from the best, from its step and a proven lower bound."""

from __future__ import annotations

from shardwise.units import format_seconds

TOLERANCE = 0.005  # gap below which a step equals its bound


def describe_bound(step_s: float, gap: float | None, by_hand: bool = False) -> str:
    """Describe `gap`, the step's excess over the bound; None: nothing proven. `by_hand`: the bound is of this layout alone.

    >>> describe_bound(1.0, 0.0)
    'proven: no layout that the search admits takes less than 1.00 s a step, and this plan takes no more'
    >>> describe_bound(2.0, 1.0)
    'proven: no layout that the search admits takes less than 1.00 s a step; this plan takes 100.0 % more, and nothing is known in between'
    """
    if gap is None:
        return "nothing is proven: the search priced the layouts that it lists, and claims nothing of others"
    subject = "no stages and no order of this layout take" if by_hand else "no layout that the search admits takes"
    least = f"proven: {subject} less than {format_seconds(step_s / (1 + gap))} a step"
    if gap < TOLERANCE:
        return f"{least}, and this plan takes no more"
    return f"{least}; this plan takes {100 * gap:.1f} % more, and nothing is known in between"
