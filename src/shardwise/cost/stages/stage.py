"""Cost of one stage (`StageCost`), and peak memory of a rank with several stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.cost.devices.compute import Seconds
from shardwise.cost.memory.memory import MARGIN, StageMemory, bytes_by_moment
from shardwise.cost.stages.gradients import NOTHING_HIDDEN, HiddenCollectives
from shardwise.plan.plan import MemoryBreakdown
from shardwise.schedules import Schedule


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
    activations, beside, late = bytes_by_moment(stages, schedule.live_microbatches(rank)).at_peak
    gradients = total.gradients + late - sum(stage.late_gradient_bytes for stage in stages)
    buffers = beside + sum(stage.buffer_bytes for stage in stages)
    excess = total.gradients + total.activations + total.buffers - gradients - activations - buffers
    return replace(total, gradients=gradients, activations=activations, buffers=buffers, margin=total.margin - MARGIN * excess)
