"""Find the fewest layers to recompute where they are recomputed several at a time (segments).

Bisection over whole segments, since a stage's memory falls with each that is recomputed but the first; the result is checked against the
prices. Not modelled: several stages on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.layout import Layout
from weft.plan.ranges import write_counts
from weft.schedules import schedule_of
from weft.solve.mixed import memory_of, owner
from weft.solve.timing import Priced, balanced, price


def shortened(pricer: Pricer, layout: Layout) -> Priced | None:
    """Return `layout` with fewer layers recomputed, priced; None where all must be, and where not even all fit."""
    if schedule_of(layout).has_replicas or layout.num_stages > layout.pipeline:
        return None
    try:
        sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
        counts = [_fewest(pricer, layout, sites, stage) for stage in range(layout.num_stages)]
        lengths = None if None in counts else [count or 0 for count in counts]
        if lengths is None or not any(lengths) or lengths == [_num_layers(pricer, layout, sites, s) for s in range(layout.num_stages)]:
            return None
        return price(pricer, replace(layout, recompute=f"full:{write_counts(lengths if len(set(lengths)) > 1 else lengths[:1])}"), sites)
    except (Infeasible, LayoutError):
        return None


def _num_layers(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int) -> int:
    return len(owner(pricer, layout, stage).loads(layout, sites, stage))


def _fewest(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int) -> int | None:
    """Return how many layers of a stage are recomputed at the least; None where it does not fit with all of them."""
    have, layers = memory_of(pricer, layout, stage), _num_layers(pricer, layout, sites, stage)
    counts: list[int] = [*range(0, layers, layout.segment), layers]

    def fits(count: int) -> bool:
        candidate = replace(layout, recompute=f"full:{count}") if count else replace(layout, recompute="none", segment=1)
        return pricer.held(candidate, sites, (stage,))[0].alone.total <= have

    if not fits(layers):
        return None
    low, high = -1, len(counts) - 1  # tried[high] fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(counts[middle]) else (middle, high)
    return counts[high]
