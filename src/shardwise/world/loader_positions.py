"""Loaders of a loop whose positions are in its checkpoints. In: a position (`train/data/position`). Out: its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class LoaderState(Protocol):
    """A loader whose position is saved with a loop."""

    def state(self) -> Any:
        """Return the position as JSON values."""
        ...

    def load_state(self, state: Any) -> None:
        """Continue at the position of a `state`."""
        ...


@dataclass(slots=True)
class LoaderPositions:
    """The positions of the loop's loaders, in the order in which they were sharded. `pending`: loaded states of loaders to come."""

    positions: list[LoaderState] = field(default_factory=list)
    pending: list[Any] = field(default_factory=list)

    def register(self, position: LoaderState) -> None:
        """Add a loader's position, and load the first state that waits for one."""
        self.positions.append(position)
        if self.pending:
            position.load_state(self.pending.pop(0))

    def load(self, states: Sequence[Any]) -> None:
        """Load the states into the loaders that are there; the rest waits for those to come."""
        for position, state in zip(self.positions, states, strict=False):
            position.load_state(state)
        self.pending = list(states[len(self.positions) :])
