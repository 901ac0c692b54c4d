"""Cost of one stage (`StageCost`), and peak memory of a rank with several stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.compute import Seconds
from shardwise.cost.memory.memory import MARGIN, StageMemory
from shardwise.cost.stages.gradients import NOTHING_HIDDEN, HiddenCollectives
from shardwise.plan.plan import MemoryBreakdown
from shardwise.schedules import LiveMicrobatches, Schedule


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one stage on one rank. `compute` and `collectives`: of one microbatch, `weight_s` of its backward for weight gradients.
    `gradients_s`, `optimizer_s`: of the step. `hidden`: collectives behind compute, part of no other seconds than by contention.
    """

    compute: Seconds
    collectives: Seconds
    gradients_s: float
    optimizer_s: float
    memory: StageMemory
    weight_s: float = 0.0
    hidden: HiddenCollectives = NOTHING_HIDDEN

    @property
    def forward_s(self) -> float:
        return self.compute.forward + self.collectives.forward

    @property
    def backward_s(self) -> float:
        return self.compute.backward + self.collectives.backward


def combine_stage_memory(stages: Sequence[StageMemory], schedule: Schedule, rank: int) -> MemoryBreakdown:
    """Return the peak memory of a rank with several stages: weights and their states of all, and saved activations of each at the peak.

    >>> from shardwise.plan.layout import Layout
    >>> from shardwise.schedules import schedule_of
    >>> both = StageMemory(MemoryBreakdown(1.0), saved_bytes=8.0), StageMemory(MemoryBreakdown(2.0), saved_bytes=3.0)
    >>> schedules = [schedule_of(Layout(pipeline=2, microbatches=2, schedule=name)) for name in ("gems-mast", "chimera")]
    >>> [combine_stage_memory(both, schedule, 0).activations for schedule in schedules]
    [8.0, 11.0]
    """
    if len(stages) == 1:
        return stages[0].alone
    total = MemoryBreakdown(*(sum(getattr(stage.alone, name) for stage in stages) for name in MemoryBreakdown.__dataclass_fields__))
    held_bytes, beside = memory_by_moment(stages, schedule.live_microbatches(rank))
    peak = int((held_bytes + beside).argmax())
    activations, buffers = float(held_bytes[peak]), float(beside[peak])
    excess = total.activations + total.buffers - activations - buffers
    return replace(total, activations=activations, buffers=buffers, margin=total.margin - MARGIN * excess)


def memory_by_moment(stages: Sequence[StageMemory], moments: LiveMicrobatches) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (saved bytes, transient bytes) of a rank by moment of its schedule."""
    columns = [
        (m.saved_bytes, m.rematerialized_bytes, m.deferred_bytes, m.transient_bytes, m.entering_bytes, m.leaving_bytes) for m in stages
    ]
    kept, there, noted, beside, entering, leaving = np.ascontiguousarray(np.array(columns, dtype=np.float64).T)
    saved = moments.in_flight @ kept + moments.backward @ there + moments.awaiting_weight_gradient @ noted
    return saved, moments.backward @ beside + moments.inputs_in_transfer @ entering + moments.gradients_in_transfer @ leaving
