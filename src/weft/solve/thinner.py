"""The fewest layers to compute again: as many of each stage's first layers as it takes to fit, and no more.

In: a pricer, a layout that recomputes every layer, where its stages begin. Out: the same layout with counts by stage. Every layer that is
not repeated saves its forward, and stages do not share memory, so the fewest of each stage are the fastest of all counts.

Not modelled: ranks with several stages, and choosing among layers of a stage that differ; the first ones are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.layout import BOTH_WAYS, Layout
from weft.plan.recomputation import Recomputation
from weft.solve.mixed import memory_of
from weft.solve.timing import Priced, balanced, clocked, price


def fewest(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> Layout | None:
    """`layout` with the fewest layers repeated under which every rank fits its device.

    None where it fits without, where it takes all of them or does not fit at all, and where ranks have several stages.
    """
    if layout.chunks > 1 or layout.schedule in BOTH_WAYS:
        return None
    counts, layers = [], []
    for stage in range(layout.num_stages):
        layers.append(pricer.num_layers(layout, sites, stage))
        count = _fewest_of(pricer, layout, sites, stage, layers[-1])
        if count is None:
            return None
        counts.append(count)
    if not any(counts) or counts == layers:
        return None
    alike = tuple(counts) if len(set(counts)) > 1 else (counts[0],)
    return replace(layout, recompute=str(Recomputation("full", alike)))


def thinned(pricer: Pricer, layout: Layout) -> Priced | None:
    """The fewest layers repeated under which `layout` fits with its balanced stages, timed by the clock; None where `fewest` has none."""
    try:
        sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
        fewer = fewest(pricer, layout, sites)
        return None if fewer is None else clocked(pricer, price(pricer, fewer, sites))
    except (Infeasible, LayoutError):
        return None


def _fewest_of(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int, layers: int) -> int | None:
    have = memory_of(pricer, layout, stage)

    def fits(count: int) -> bool:
        counts = tuple(count * (s == stage) for s in range(layout.num_stages))
        word = str(Recomputation("full", counts)) if count else "none"
        return pricer.held(replace(layout, recompute=word), sites, (stage,))[0].total <= have

    if fits(0):
        return 0
    low, high = 0, layers  # `low` does not fit
    if not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
