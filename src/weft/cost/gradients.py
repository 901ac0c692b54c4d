"""Seconds of summing gradients over data replicas. In: how many, a layout, widths. Out: seconds of the step and of each microbatch.

Sums run in buckets behind the last backward where a framework overlaps them, in one go after it where not. ZeRO (Rajbhandari et al.
2020): stages 1 and 2 reduce-scatter gradients and gather the new weights; from stage 2 gradients are scattered every microbatch, since
none is kept whole; stage 3 gathers weights for every forward and backward, two layers ahead of use. Not modelled: buckets that
start late, and sums that slow down the compute that they hide behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.cost.compute import Seconds
from weft.cost.memory import Widths
from weft.cost.network import Group
from weft.plan.layout import BOTH_WAYS, Layout

if TYPE_CHECKING:
    from weft.cost.step import Pricer

BUCKET_BYTES = 25 * 2**20  # gradients are summed in pieces of this size where they overlap, and on processors


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers of gradients to sum over each set of axes; `tied` are summed with the other stage that has them; `number`: parameters."""

    over: tuple[tuple[tuple[str, ...], float], ...]
    tied: float
    number: float


def summing_s(
    pricer: Pricer, layout: Layout, sums: Sums, widths: Widths, overlap: float, window_s: float, each_s: float
) -> tuple[float, Seconds]:
    """(seconds of a step that show, collectives of every microbatch that show).

    `window_s`: what the sums of a step could hide behind; `each_s`: what those of a microbatch could.
    """
    after, last = 0.0, 0.0
    inside = Seconds()
    is_cpu = pricer.cluster.is_cpu
    bucketed = is_cpu or overlap > 0
    for axes, count in sums.over:
        spread = "expert" in axes and layout.expert > 1
        data = layout.data // layout.expert if spread else layout.data
        kept = tuple(a for a in axes if (a in ("data", "expert") and data > 1) or (a == "tensor" and layout.tensor > 1))
        if not kept:
            continue
        count /= layout.expert if spread else 1
        group = pricer.group(layout, *("replicas" if spread else "data" if a == "expert" else a for a in kept))
        size = widths.gradient * count
        pieces = max(1.0, size / BUCKET_BYTES) if bucketed else 1.0
        if layout.zero == 0:
            one = pricer.collective("all_reduce", size / pieces, group)
            after += pieces * one
        else:
            one = pricer.collective("reduce_scatter", size / pieces, group)
            weights = pricer.collective("all_gather", widths.weight * count, group)
            if layout.zero == 1:
                after += pieces * one + weights
            elif layout.zero == 2:
                inside += Seconds(0.0, pieces * one)
                after += weights
            else:
                again = 2 if layout.recompute == "full" else 1
                inside += Seconds(weights, again * weights + pieces * one)
        last = max(last, one)
    if sums.tied and not is_cpu and layout.pipeline > 1:
        ends = Group(2, layout.data * layout.tensor * (layout.pipeline - 1), layout.num_ranks)
        after += pricer.collective("all_reduce", widths.gradient * sums.tied, ends)
    if overlap:
        after = max(min(last, after), after - overlap * window_s)
    if inside.total:
        # Every microbatch's collectives run beside its compute; what is longer shows.
        hides = 0.0 if is_cpu else max(overlap, ZERO_HIDES)
        hidden = max(0.0, 1 - each_s * hides / inside.total)
        inside = Seconds(inside.forward * hidden, inside.backward * hidden)
    return after, inside


def exchange_s(pricer: Pricer, layout: Layout, stage: int, sums: Sums, widths: Widths) -> float:
    """Seconds of summing a stage's gradients with the rank that has its other replica, where a schedule goes both ways."""
    away = abs(layout.pipeline - 1 - 2 * stage)
    if layout.schedule not in BOTH_WAYS or not away:
        return 0.0
    pair = Group(2, away * layout.data * layout.tensor, layout.num_ranks)
    return pricer.collective("all_reduce", widths.gradient * sums.number, pair)


ZERO_HIDES = 0.7  # part of a microbatch that gathers of ZeRO-3 and scatters of ZeRO-2 hide behind, as DeepSpeed prefetches; assumed
