"""What one stage costs, and what several on one rank do. In: seconds and bytes. Out: `StageCost`, sums, the delay of the slowest rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weft.cost.devices.compute import Seconds
from weft.cost.memory.memory import MARGIN, StageMemory
from weft.plan.plan import Memory
from weft.schedules import Held, Schedule


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one rank. `compute` and `tensor`: of one microbatch, `weight_s` of its backward being for the gradients of weights.
    `gradients_s`, `optimizer_s`: of the step.
    """

    compute: Seconds
    tensor: Seconds
    gradients_s: float
    optimizer_s: float
    memory: StageMemory
    weight_s: float = 0.0

    @property
    def forward_s(self) -> float:
        return self.compute.forward + self.tensor.forward

    @property
    def backward_s(self) -> float:
        return self.compute.backward + self.tensor.backward


def together(held: Sequence[StageMemory], schedule: Schedule, rank: int) -> Memory:
    """What the stages of one rank hold when they hold most: weights and their states of all, and what is kept of each by then.

    >>> from weft.plan.layout import Layout
    >>> from weft.schedules import schedule_of
    >>> both = StageMemory(Memory(1.0), kept_bytes=8.0), StageMemory(Memory(2.0), kept_bytes=3.0)
    >>> named = [schedule_of(Layout(pipeline=2, microbatches=2, schedule=name)) for name in ("gems-mast", "chimera")]
    >>> [together(both, one, 0).activations for one in named]
    [8.0, 11.0]
    """
    if len(held) == 1:
        return held[0].alone
    total = Memory(*(sum(getattr(one.alone, name) for one in held) for name in Memory.__dataclass_fields__))
    held_bytes, beside = by_moment(held, schedule.held(rank))
    most = int((held_bytes + beside).argmax())
    activations, buffers = float(held_bytes[most]), float(beside[most])
    less = total.activations + total.buffers - activations - buffers
    return replace(total, activations=activations, buffers=buffers, margin=total.margin - MARGIN * less)


def by_moment(held: Sequence[StageMemory], now: Held) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """By moment of `now`: what a rank keeps, and what is there besides."""

    def of(part: str) -> NDArray[np.float64]:
        return np.array([getattr(one, part) for one in held])

    held_bytes = now.in_flight @ of("kept_bytes") + now.backward @ of("there_bytes") + now.noted @ of("noted_bytes")
    beside = now.backward @ of("beside_bytes") + now.entering @ of("entering_bytes") + now.returning @ of("leaving_bytes")
    return held_bytes, beside
