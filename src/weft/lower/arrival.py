"""Constants that are still on their way when a stage begins, and are waited for where they are first read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Arrival:
    """What is to be done before such a constant can be read; nothing where all are there."""

    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Until all are there."""
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


def arrived(arrival: Arrival, x: Tensor) -> Tensor:
    """`x` once it is there."""
    arrival.wait()
    return x
