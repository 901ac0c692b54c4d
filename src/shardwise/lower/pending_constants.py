"""Constants still in flight when a stage begins, waited for where they are first read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass
class PendingConstants:
    """The pending wait for such constants; nothing once they have arrived."""

    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Wait for the constants."""
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()


def wait_for_constant(arrival: PendingConstants, x: Tensor) -> Tensor:
    """Return `x` after the wait."""
    arrival.wait()
    return x
