"""What one step tells. In: sums over all ranks, under way. Out: numbers, once they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from weft.run.step.dispatch import Result
from weft.world.world import Work

Judge = Callable[[Result, Sequence[float]], str]  # of a step before its update, with the norm of each rank's gradients: why it is doubted


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step tells: the loss over the whole batch, the gradient norm where it is clipped, seconds.

    `grad_norm` is that of the update which this step applied: with staleness=K of the step K before it, and None before there is one.
    """

    grad_norm: float | None
    step_time_s: float
    total: Tensor = field(repr=False)
    summed: Work = field(repr=False)
    loss_scale: float | None = None  # of the next step, in float16

    @property
    def loss(self) -> float:
        """On the weights that the step computed with. With staleness it waits until all ranks have made the step."""
        self.summed.wait()
        return mean_of(self.total)


def mean_of(total: Tensor) -> float:
    """A loss that was summed; where what it is divided by was summed beside it, so divided."""
    return float(total[0] / total[1]) if total.dim() else float(total)
