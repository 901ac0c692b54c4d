"""Find the fewest layers to recompute where they are recomputed several at a time (segments).

Bisection over whole segments, since a stage's memory falls with each that is recomputed but the first; the result is checked against the
prices. Not modelled: several stages on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.cost.step import Pricer
from shardwise.cost.step_time.heterogeneous import stage_device_memory, stage_pricer
from shardwise.cost.step_time.timing import PricedLayout, balanced_sites, price
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.ir.ranges import write_counts
from shardwise.plan.layout import Layout
from shardwise.schedules import schedule_of


def with_fewest_recomputed_segments(pricer: Pricer, layout: Layout) -> PricedLayout | None:
    """Return `layout` with fewer layers recomputed, priced; None where all must be, and where not even all fit."""
    if schedule_of(layout).has_replicas or layout.num_stages > layout.pipeline:
        return None
    try:
        sites = balanced_sites(pricer, layout) if layout.num_stages > 1 else ()
        counts = [_min_recomputed_layers(pricer, layout, sites, stage) for stage in range(layout.num_stages)]
        lengths = None if None in counts else [count or 0 for count in counts]
        if lengths is None or not any(lengths) or lengths == [_num_layers(pricer, layout, sites, s) for s in range(layout.num_stages)]:
            return None
        return price(pricer, replace(layout, recompute=f"full:{write_counts(lengths if len(set(lengths)) > 1 else lengths[:1])}"), sites)
    except (Infeasible, LayoutError):
        return None


def _num_layers(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int) -> int:
    return len(stage_pricer(pricer, layout, stage).layer_costs(layout, sites, stage))


def _min_recomputed_layers(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int) -> int | None:
    """Return how many layers of a stage are recomputed at the least; None where it does not fit with all of them."""
    have, layers = stage_device_memory(pricer, layout, stage), _num_layers(pricer, layout, sites, stage)
    counts: list[int] = [*range(0, layers, layout.segment), layers]

    def fits(count: int) -> bool:
        candidate = replace(layout, recompute=f"full:{count}") if count else replace(layout, recompute="none", segment=1)
        return pricer.stage_memories(candidate, sites, (stage,))[0].alone.total <= have

    if not fits(layers):
        return None
    low, high = -1, len(counts) - 1  # tried[high] fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(counts[middle]) else (middle, high)
    return counts[high]
