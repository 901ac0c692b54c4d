"""Stale updates: stale-synchronous parallel training (Ho et al., NIPS 2013; Li et al., OSDI 2014).

After step t, weights have the updates of steps 0 to t - staleness, applied in order, and no others. So the weights of a step do not depend
on the ranks' speeds, and no rank is more than `staleness` steps ahead, since an all-reduce needs every rank's gradients. Each pending step
has its own gradient buffer.

All ranks drain at the same steps. Not modelled: sharded gradients, or gradients shared with a rank of another stage.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from torch import Tensor

from weft.run.reduce.overlapped import Gradients
from weft.run.state.optimizer import Optimizer
from weft.world.world import Work


@dataclass(frozen=True)
class _PendingUpdate:
    """A pending update: index of its gradient buffers, its all-reduces, learning rate, and the divisor of its gradients."""

    turn: int
    works: list[Work]
    lr: float | None
    divisor: Tensor | None


class Stale:
    """The updates of one rank. In every step `start` before backward, `begin_update` after it, then `push`; a step may be restarted."""

    def __init__(self, staleness: int, gradients: Gradients, optimizer: Optimizer) -> None:
        self._staleness, self._gradients, self._optimizer = staleness, gradients, optimizer
        self._pending: deque[_PendingUpdate] = deque()
        self._works: list[Work] = []  # of the step that is not pushed yet
        self._divisor: Tensor | None = None  # by which its gradients are still to be divided
        self._turn = 0
        self.waited_s = 0.0  # in the last `push`
        self.weights: list[Tensor] = []  # no weights besides the model's, and no receive buffers
        self.rooms: list[Tensor] = []

    def start(self) -> None:
        """Accumulate gradients in buffers that no pending update uses."""
        self.settle()
        self._gradients.turn(self._turn)
        for pending in self._pending:  # shared-memory all-reduces make progress when polled
            for work in pending.works:
                _ = work.done

    def take(self, loss: Work, divisor: Tensor | None = None, counted: Tensor | None = None) -> None:
        """Take over this step's pending all-reduces, with that of the loss; gradients are later divided by `divisor`, the all-reduced
        `local_divisor`."""
        self._works = [*self._gradients.hand_over(), loss]
        self._divisor = divisor

    def settle(self) -> None:
        """Wait for the all-reduces of the step that is not pushed yet, so that its gradients can be read."""
        for work in self._works:
            work.wait()
        self._divide(self._turn, self._divisor)
        self._divisor = None

    def _divide(self, turn: int, divisor: Tensor | None) -> None:
        if divisor is not None:
            for group in self._gradients.groups:
                group.turns[turn].div_(divisor.to(group.turns[turn].dtype))

    def push(self, lr: float | None) -> float | None:
        """End a step and apply the update that is due; return that update's gradient norm if it is clipped."""
        self._pending.append(_PendingUpdate(self._turn, self._works, lr, self._divisor))
        self._works, self._divisor = [], None
        self._turn = (self._turn + 1) % (self._staleness + 1)
        self.waited_s = 0.0
        norm = None
        while len(self._pending) > self._staleness:
            norm = self._apply()
        return norm

    def drain(self) -> None:
        """Apply all pending updates."""
        while self._pending:
            self._apply()

    def forget(self) -> None:
        """Discard all pending updates, since the weights were replaced."""
        while self._pending:
            self._wait(self._pending.popleft())

    def _apply(self) -> float | None:
        pending = self._pending.popleft()
        self._wait(pending)
        self._divide(pending.turn, pending.divisor)
        self._optimizer.read([group.turns[pending.turn] for group in self._gradients.groups])
        return self._optimizer.step(pending.lr)

    def _wait(self, pending: _PendingUpdate) -> None:
        start_s = time.perf_counter()
        for work in pending.works:
            work.wait()
        self.waited_s += time.perf_counter() - start_s
