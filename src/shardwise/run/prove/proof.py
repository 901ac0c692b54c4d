"""Result of a proof: equal, or what differs first."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.run.prove.locate import WrongValue


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of one rank that is not the serial run's. `kind`: gradient, weight, or a slot of the optimizer."""

    step: int
    rank: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.name} on rank {self.rank} in step {self.step + 1}"


@dataclass(frozen=True)
class Proof:
    """Result of a proof. `points`: random points at which both sides were equal, or at the last of which they were not; `redrawn`: further
    ones that a zero divisor spoiled. `error_probability`: at most with which a wrong plan passes; 1 for one that differs. `wrong_value`: the first operator whose
    value differs, if the difference arises in forward."""

    layout: str
    model: str
    points: int
    redrawn: int
    error_probability: float
    differences: tuple[Difference, ...] = ()
    wrong_value: WrongValue | None = None

    @property
    def ok(self) -> bool:
        return not self.differences
