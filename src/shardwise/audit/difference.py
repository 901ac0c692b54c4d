"""The first difference of two runs, and all that the audit says of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KINDS = {
    "record": "nothing, or too little, was recorded",
    "parameters": "parameters that no rank holds, or that the serial run does not have",
    "ties": "a parameter with two names is two parameters in the parallel run",
    "start": "initial weights differ",
    "data": "other samples than the serial batch, or some of them several times",
    "dropout": "masks that are equal where ranks hold different values, or different where they hold equal ones",
    "factor": "gradients are a constant factor of the serial ones",
    "rank factor": "every rank's gradients have a factor of their own: clipped by a local norm",
    "unequal counts": "means over unequal numbers of targets are averaged as if they were equal",
    "clipping": "norms that clipping measures differ from the serial norm",
    "not reduced": "gradients of replicas differ, and their sum or mean is the serial gradient",
    "not cleared": "gradients of the step before are still in these",
    "statistics": "statistics of batch normalisation, or other buffers, are those of each rank's own samples",
    "gradients": "gradients differ otherwise",
    "optimizer": "gradients agree, but the weights change differently",
}


@dataclass(frozen=True)
class RunDifference:
    """A difference: its kind, where it is, and a sentence. `factor`: of gradients or updates, where one explains the difference.

    `parameter`: the first one in forward order; `wrong`, `compared`: numbers of tensors that differ, and that were compared.
    """

    kind: str
    text: str
    step: int | None = None
    parameter: str | None = None
    ranks: tuple[int, ...] = ()
    factor: float | None = None
    wrong: int = 0
    compared: int = 0

    def record(self) -> dict[str, Any]:
        """Return the difference in JSON types."""
        return {**vars(self), "parameter": self.parameter or "", "ranks": list(self.ranks)}


@dataclass
class StepErrors:
    """One step's worst relative errors, each with the tolerance that the noise gives, and mean losses."""

    step: int
    gradients: float = 0.0
    updates: float = 0.0
    serial_loss: float | None = None
    parallel_loss: float | None = None


@dataclass
class Noise:
    """`unit`: one unit of rounding of the coarsest type; `gradients`: what it changes a usual gradient by, relatively;
    `largest_accepted`: error of a gradient that counts as equal; `ignored`: gradients that are nothing but noise."""

    unit: float = 0.0
    gradients: float = 0.0
    largest_accepted: float = 0.0
    ignored: int = 0


@dataclass
class AuditResult:
    """The answer of an audit."""

    differences: list[RunDifference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: list[StepErrors] = field(default_factory=list)
    noise: Noise = field(default_factory=Noise)
    ranks: int = 0

    @property
    def equal(self) -> bool:
        """Return whether the runs compute the same within the noise."""
        return not self.differences

    @property
    def verdict(self) -> str:
        """The kind of the first difference, or `equal`."""
        return "equal" if self.equal else self.differences[0].kind

    def record(self) -> dict[str, Any]:
        """Return the answer in JSON types."""
        first = self.differences[0] if self.differences else None
        return {
            "equal": self.equal, "verdict": self.verdict, "first_difference": first.record() if first else None,
            "factor": first.factor if first else None, "differences": [d.record() for d in self.differences], "ranks": self.ranks,
            "noise": vars(self.noise), "steps": [vars(s) for s in self.steps], "notes": self.notes,
        }  # fmt: skip
