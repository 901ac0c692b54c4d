"""Cost of one stage (`StageCost`), and peak memory of a rank with several stages."""

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
    """Cost of one stage on one rank. `compute` and `collectives`: of one microbatch, `weight_s` of its backward for weight gradients.
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
    """Return the peak memory of a rank with several stages: weights and their states of all, and saved activations of each at the peak.

    >>> from weft.plan.layout import Layout
    >>> from weft.schedules import schedule_of
    >>> both = StageMemory(Memory(1.0), kept_bytes=8.0), StageMemory(Memory(2.0), kept_bytes=3.0)
    >>> schedules = [schedule_of(Layout(pipeline=2, microbatches=2, schedule=name)) for name in ("gems-mast", "chimera")]
    >>> [together(both, schedule, 0).activations for schedule in schedules]
    [8.0, 11.0]
    """
    if len(held) == 1:
        return held[0].alone
    total = Memory(*(sum(getattr(stage.alone, name) for stage in held) for name in Memory.__dataclass_fields__))
    held_bytes, beside = by_moment(held, schedule.held(rank))
    peak = int((held_bytes + beside).argmax())
    activations, buffers = float(held_bytes[peak]), float(beside[peak])
    excess = total.activations + total.buffers - activations - buffers
    return replace(total, activations=activations, buffers=buffers, margin=total.margin - MARGIN * excess)


def by_moment(held: Sequence[StageMemory], now: Held) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (saved bytes, transient bytes) of a rank by moment of its schedule."""
    columns = [(m.kept_bytes, m.there_bytes, m.noted_bytes, m.beside_bytes, m.entering_bytes, m.leaving_bytes) for m in held]
    kept, there, noted, beside, entering, leaving = np.ascontiguousarray(np.array(columns, dtype=np.float64).T)
    saved = now.in_flight @ kept + now.backward @ there + now.noted @ noted
    return saved, now.backward @ beside + now.entering @ entering + now.returning @ leaving
