"""What one stage costs, and what several on one rank do. In: seconds and bytes. Out: `StageCost`, sums, the delay of the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt

from weft.cost.compute import Seconds
from weft.cost.memory import MARGIN
from weft.plan.layout import Layout
from weft.plan.plan import Memory


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one rank. `compute` and `tensor`: of one microbatch, `weight_s` of its backward being for the gradients of weights.
    `gradients_s`, `optimizer_s`: of the step.
    """

    compute: Seconds
    tensor: Seconds
    gradients_s: float
    optimizer_s: float
    memory: Memory
    weight_s: float = 0.0

    @property
    def forward_s(self) -> float:
        return self.compute.forward + self.tensor.forward

    @property
    def backward_s(self) -> float:
        return self.compute.backward + self.tensor.backward


def work_share(layout: Layout, rank: int, stage: int) -> float:
    """Part of the microbatches that a rank computes of one of its stages: half, where another rank has the other half."""
    if own := layout.own:
        return own.shares[rank][stage]
    return 1 / len(layout.ranks_of(stage))


def straggling(num_ranks: int, spread: float) -> float:
    """How much longer the slowest of `num_ranks` takes than the mean one, as a part of its time.

    The expected largest of n normal deviates is about sqrt(2 ln n) standard deviations (Gumbel 1958): `spread` of them each.

    >>> round(straggling(3072, 0.01), 3)
    0.04
    """
    return spread * sqrt(2 * log(num_ranks)) if num_ranks > 1 else 0.0


def together(held: Sequence[Memory], layout: Layout, rank: int) -> Memory:
    """What the stages of one rank hold. Of GEMS it holds activations of one of them at a time (Jain et al. 2020, section IV).

    >>> both = Memory(1.0, 0, 0, 8.0), Memory(2.0, 0, 0, 3.0)
    >>> together(both, Layout(pipeline=2, microbatches=2, schedule="gems-mast"), 0).activations, together(both, Layout(), 0).activations
    (8.0, 11.0)
    """
    if len(held) == 1:
        return held[0]
    total = Memory(*(sum(getattr(one, name) for one in held) for name in Memory.__dataclass_fields__))
    own = layout.own
    if not (own.one_at_a_time(rank) if own else layout.schedule.startswith("gems")):
        return total
    fullest = max(held, key=lambda one: one.activations + one.buffers)
    less = total.activations + total.buffers - fullest.activations - fullest.buffers
    return replace(total, activations=fullest.activations, buffers=fullest.buffers, margin=total.margin - MARGIN * less)
