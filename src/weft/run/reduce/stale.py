"""Updates that come late: stale-synchronous parallel training (Ho et al., NIPS 2013; Li et al., OSDI 2014).

In: step after step, gradients whose sums are under way, and a learning rate. Out: after step t, weights with the updates of steps 0 to
t - staleness, applied in order, and no others. So the next step computes on the same weights however fast anybody is, and nobody
is further ahead than `staleness` steps, since those sums need everyone's gradients. Each step under way has a buffer of its own.

All ranks drain at the same steps. Not modelled: gradients that are pieces, or of which a rank of another stage has a part.
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
    """An update that waits: which buffers its gradients lie in, their sums, its learning rate, what its gradients are to be divided by."""

    turn: int
    works: list[Work]
    lr: float | None
    divisor: Tensor | None


class Stale:
    """The updates of one rank. In every step `start` before its backward, `take` after it, then `push`; a step may be begun again."""

    def __init__(self, staleness: int, gradients: Gradients, optimizer: Optimizer) -> None:
        self._staleness, self._gradients, self._optimizer = staleness, gradients, optimizer
        self._pending: deque[_PendingUpdate] = deque()
        self._works: list[Work] = []  # of the step that is not pushed yet
        self._divisor: Tensor | None = None  # and what its gradients are still to be divided by
        self._turn = 0
        self.waited_s = 0.0  # by the last `push`
        self.weights: list[Tensor] = []  # beside those that the model has; and what gradients arrive in
        self.rooms: list[Tensor] = []

    def start(self) -> None:
        """Collect in buffers that no update waits for."""
        self.settle()
        self._gradients.turn(self._turn)
        for pending in self._pending:  # between ranks of one host sums move when they are looked at
            for work in pending.works:
                _ = work.done

    def take(self, loss: Work, divisor: Tensor | None = None, counted: Tensor | None = None) -> None:
        """The sums of this step are under way, `loss` among them, and with it `divisor`, by which gradients are then divided: the sum of
        what ranks `counted`."""
        self._works = [*self._gradients.hand_over(), loss]
        self._divisor = divisor

    def settle(self) -> None:
        """Wait for the sums of the step that is not pushed yet, so that its gradients can be read."""
        for work in self._works:
            work.wait()
        self._divide(self._turn, self._divisor)
        self._divisor = None

    def _divide(self, turn: int, divisor: Tensor | None) -> None:
        if divisor is not None:
            for group in self._gradients.groups:
                group.turns[turn].div_(divisor.to(group.turns[turn].dtype))

    def push(self, lr: float | None) -> float | None:
        """End a step; apply the update that is due. Returns the gradient norm of that one where it is clipped."""
        self._pending.append(_PendingUpdate(self._turn, self._works, lr, self._divisor))
        self._works, self._divisor = [], None
        self._turn = (self._turn + 1) % (self._staleness + 1)
        self.waited_s = 0.0
        norm = None
        while len(self._pending) > self._staleness:
            norm = self._apply()
        return norm

    def drain(self) -> None:
        """Apply all updates that wait."""
        while self._pending:
            self._apply()

    def forget(self) -> None:
        """Let all updates that wait go, since the weights have become others."""
        while self._pending:
            self._wait(self._pending.popleft())

    def _apply(self) -> float | None:
        pending = self._pending.popleft()
        self._wait(pending)
        self._divide(pending.turn, pending.divisor)
        self._optimizer.read([group.turns[pending.turn] for group in self._gradients.groups])
        return self._optimizer.step(pending.lr)

    def _wait(self, pending: _PendingUpdate) -> None:
        began = time.perf_counter()
        for work in pending.works:
            work.wait()
        self.waited_s += time.perf_counter() - began
