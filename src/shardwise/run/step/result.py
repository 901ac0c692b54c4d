"""Result of one training step. In: pending all-reduces. Out: numbers, which are waited for when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shardwise.run.step.dispatch import RunResult
from shardwise.world.world import CollectiveWork

StepCheck = Callable[[RunResult, Sequence[float]], str]  # (result, each rank's gradient norm) -> why a step is suspect, or empty


@dataclass(frozen=True, slots=True)
class StepResult:
    """Loss over the whole batch, gradient norm if clipped, and time of one step.

    `grad_norm` belongs to the update that this step applied: with staleness=K of the step K before it, and None before there is one.
    """

    grad_norm: float | None
    step_time_s: float
    total: Tensor = field(repr=False)
    reduction: CollectiveWork = field(repr=False)
    loss_scale: float | None = None  # of the next step, in float16

    @property
    def loss(self) -> float:
        """Loss at the weights before the update. With staleness it waits until all ranks have completed the step."""
        self.reduction.wait()
        return mean_loss(self.total)


def mean_loss(total: Tensor) -> float:
    """Return a reduced loss, divided by its divisor if that was reduced with it."""
    return float(total[0] / total[1]) if total.dim() else float(total)
