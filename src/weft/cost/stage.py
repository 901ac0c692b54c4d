"""What one stage costs, and what several on one rank do. In: seconds and bytes. Out: `StageCost`, sums, the delay of the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt

from weft.cost.compute import Seconds
from weft.plan.layout import BOTH_WAYS, Layout
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


def work_share(layout: Layout, rank: int) -> float:
    """Part of the microbatches that a rank computes of each of its stages: half, where another rank has the other half."""
    return 0.5 if layout.schedule in BOTH_WAYS and len(layout.stages_of(rank)) == 2 else 1.0


def straggling(num_ranks: int, spread: float) -> float:
    """How much longer the slowest of `num_ranks` takes than the mean one, as a part of its time.

    The expected largest of n normal deviates is about sqrt(2 ln n) standard deviations (Gumbel 1958): `spread` of them each.

    >>> round(straggling(3072, 0.01), 3)
    0.04
    """
    return spread * sqrt(2 * log(num_ranks)) if num_ranks > 1 else 0.0


def together(held: Sequence[Memory]) -> Memory:
    """What the stages of one rank hold."""
    if len(held) == 1:
        return held[0]
    return Memory(*(sum(getattr(one, name) for one in held) for name in Memory.__dataclass_fields__))
