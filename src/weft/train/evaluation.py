"""The validation loss, with the model in evaluation mode.

A model that cannot be captured in evaluation mode is evaluated eagerly on rank 0, with gathered weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.capture.capture import called, taken
from weft.errors import Infeasible, ModelError
from weft.run.engine import Engine
from weft.train.subject import Subject
from weft.world.world import World


@dataclass
class Evaluation:
    """`rows`: this rank's rows of a batch of `batch` samples; `max_batches`: at most so many are evaluated. Every rank calls it."""

    engine: Engine
    subject: Subject
    world: World
    batch: int
    most: int
    rows: Sequence[int]
    _as_it_is: bool = False

    def loss(self, say: Callable[[str], object]) -> float | None:
        """Mean loss over the first validation batches, the last of which may be smaller; None on ranks other than 0 if unsharded."""
        full = max(1, self.subject.source.num_validation // self.batch)
        count = min(self.most, full)
        remainder = self.subject.source.num_validation - full * self.batch if self.most > full else 0
        if not self._as_it_is:
            try:
                return self._sharded(count, max(0, remainder), say)
            except ModelError as error:  # raised on every rank, before any communication
                self._as_it_is = True
                say(f"evaluated on one rank, with all weights: {error}")
        return self._gathered(count)

    def _sharded(self, count: int, left: int, say: Callable[[str], object]) -> float:
        source, batch = self.subject.source, self.batch
        losses = [self.engine.evaluate(source.validation(number, self.rows), samples=batch) for number in range(count)]
        if left:
            try:
                last = self.engine.evaluate(source.validation(count, range(left)), whole=True)
            except (Infeasible, ModelError) as error:  # raised on every rank, before any communication
                say(f"the last {left} validation samples are left out: {error}")
            else:
                return (sum(losses) * batch + last * left) / (count * batch + left)
        return sum(losses) / count

    def _gathered(self, count: int) -> float | None:
        state = self.engine.full_state_dict()
        if state is None:
            self.world.maximum([0])
            return None
        model = self.subject.make()
        model.load_state_dict(state, strict=False)
        model.to(self.world.device).eval()
        with torch.no_grad():
            losses = [self._one(model, self.subject.source.validation(number, range(self.batch))) for number in range(count)]
        self.world.maximum([0])  # the others wait
        return sum(losses) / count

    def _one(self, model: torch.nn.Module, batch: Any) -> float:
        if self.subject.loss is not None:
            return float(self.subject.loss(called(model, taken(model, batch)), batch))
        out = called(model, batch)
        return float(getattr(out, "loss", out))
