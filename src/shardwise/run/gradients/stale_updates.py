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

from shardwise.run.gradients.gradient_reducer import GradientReducer
from shardwise.run.state.optimizer import Optimizer
from shardwise.world.world import CollectiveWork


@dataclass(frozen=True)
class _StaleUpdate:
    """A pending update: index of its gradient buffers, its all-reduces, learning rate, and the divisor of its gradients."""

    buffer: int
    works: list[CollectiveWork]
    lr: float | None
    divisor: Tensor | None


class StaleUpdates:
    """The updates of one rank. In every step `start` before backward, `begin_update` after it, then `push`; a step may be restarted."""

    def __init__(self, staleness: int, gradients: GradientReducer, optimizer: Optimizer) -> None:
        self._staleness, self._gradients, self._optimizer = staleness, gradients, optimizer
        self._pending: deque[_StaleUpdate] = deque()
        self._works: list[CollectiveWork] = []  # of the step that is not pushed yet
        self._divisor: Tensor | None = None  # by which its gradients are still to be divided
        self._buffer = 0
        self.waited_s = 0.0  # in the last `push`
        self.weights: list[Tensor] = []  # no weights besides the model's, and no receive buffers
        self.receive_buffers: list[Tensor] = []

    def start(self) -> None:
        """Accumulate gradients in buffers that no pending update uses."""
        self.synchronize_gradients()
        self._gradients.use_buffer(self._buffer)
        for pending in self._pending:  # shared-memory all-reduces make progress when polled
            for work in pending.works:
                _ = work.is_done

    def begin_update(self, loss_work: CollectiveWork, divisor: Tensor | None = None, local_divisor: Tensor | None = None) -> None:
        """Take over this step's pending all-reduces, with that of the loss; gradients are later divided by `divisor`, the all-reduced
        `local_divisor`."""
        self._works = [*self._gradients.take_pending_work(), loss_work]
        self._divisor = divisor

    def synchronize_gradients(self) -> None:
        """Wait for the all-reduces of the step that is not pushed yet, so that its gradients can be read."""
        for work in self._works:
            work.wait()
        self._divide(self._buffer, self._divisor)
        self._divisor = None

    def _divide(self, buffer: int, divisor: Tensor | None) -> None:
        if divisor is not None:
            for group in self._gradients.groups:
                group.step_buffers[buffer].div_(divisor.to(group.step_buffers[buffer].dtype))

    def push(self, lr: float | None) -> Tensor | None:
        """End a step and apply the update that is due; return that update's gradient norm if it is clipped."""
        self._pending.append(_StaleUpdate(self._buffer, self._works, lr, self._divisor))
        self._works, self._divisor = [], None
        self._buffer = (self._buffer + 1) % (self._staleness + 1)
        self.waited_s = 0.0
        norm = None
        while len(self._pending) > self._staleness:
            norm = self._apply()
        return norm

    def drain(self) -> None:
        """Apply all pending updates."""
        while self._pending:
            self._apply()

    def discard_pending(self) -> None:
        """Discard all pending updates, since the weights were replaced."""
        while self._pending:
            self._wait(self._pending.popleft())

    def _apply(self) -> Tensor | None:
        pending = self._pending.popleft()
        self._wait(pending)
        self._divide(pending.buffer, pending.divisor)
        self._optimizer.use_gradients([group.step_buffers[pending.buffer] for group in self._gradients.groups])
        return self._optimizer.step(pending.lr)

    def _wait(self, pending: _StaleUpdate) -> None:
        start_s = time.perf_counter()
        for work in pending.works:
            work.wait()
        self.waited_s += time.perf_counter() - start_s
