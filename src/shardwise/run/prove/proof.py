"""Result of a proof: equal, or what differs first."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.run.prove.locate import WrongValue


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor of one rank that is not the serial run's. `kind`: loss, gradient, weight, or a slot of the optimizer."""

    step: int
    rank: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} of {self.name} on rank {self.rank} in step {self.step + 1}"


@dataclass(frozen=True, repr=False)
class Proof:
    """Result of a proof.

    `points`: random points at which both sides were equal, or at the last of which they were not; `redrawn`: further ones that a zero
    divisor spoiled. `error_probability`: at most with which a wrong plan passes; 1 for one that differs. `wrong_value`: the first operator
    whose value differs, if the difference arises in forward. `reduction`: what a larger plan was reduced to, and why that suffices; empty
    for a plan that was proven as it is. `unknown_operators`: those that stood as random functions of their arguments.
    """

    layout: str
    model: str
    points: int
    redrawn: int
    error_probability: float
    differences: tuple[Difference, ...] = ()
    wrong_value: WrongValue | None = None
    reduction: str = ""
    unknown_operators: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.differences

    @property
    def outcome(self) -> str:
        """Equal, and with what probability that is wrong, or what differs first."""
        if self.ok:
            return f"equal (a wrong plan passes with a probability of at most {self.error_probability:.0e})"
        where = f"first at {self.wrong_value}; " if self.wrong_value is not None else ""
        unknown = f"; {', '.join(self.unknown_operators)} stood as random functions of their arguments" if self.unknown_operators else ""
        return f"{where}{len(self.differences)} tensors differ, first the {self.differences[0]}{unknown}"

    def __repr__(self) -> str:
        return f"Proof({self.layout}: {self.outcome})"

    def record(self) -> dict[str, object]:
        """Return the JSON object of `shardwise prove`."""
        wrong = self.wrong_value
        return {
            "layout": self.layout,
            "ok": self.ok,
            "reduction": self.reduction,
            "points": self.points,
            "redrawn": self.redrawn,
            "error_probability": self.error_probability,
            "differences": [str(difference) for difference in self.differences],
            "first_operator": None
            if wrong is None
            else {"site": wrong.site, "value": wrong.value, "rank": wrong.rank, "placement": dict(wrong.placement)},
        }
