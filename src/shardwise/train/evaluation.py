"""The validation loss, with the model in evaluation mode.

A model that cannot be captured in evaluation mode is evaluated eagerly on rank 0, with gathered weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.capture.capture import call_model, forward_arguments
from shardwise.errors import Infeasible, ModelError
from shardwise.run.engine import Engine
from shardwise.train.training_task import TrainingTask
from shardwise.world.world import World


@dataclass
class Evaluation:
    """`rows`: this rank's rows of a batch of `batch` samples; `max_batches`: at most so many are evaluated. Every rank calls it."""

    engine: Engine
    task: TrainingTask
    world: World
    batch: int
    max_batches: int
    rows: Sequence[int]
    _is_unsharded: bool = False

    def loss(self, say: Callable[[str], object]) -> float | None:
        """Mean loss over the first validation batches, the last of which may be smaller; None on ranks other than 0 if unsharded."""
        full = max(1, self.task.source.num_validation // self.batch)
        count = min(self.max_batches, full)
        remainder = self.task.source.num_validation - full * self.batch if self.max_batches > full else 0
        if not self._is_unsharded:
            try:
                return self._evaluate_sharded(count, max(0, remainder), say)
            except ModelError as error:  # raised on every rank, before any communication
                self._is_unsharded = True
                say(f"evaluated on one rank, with all weights: {error}")
        return self._evaluate_gathered(count)

    def _evaluate_sharded(self, count: int, remainder: int, say: Callable[[str], object]) -> float:
        source, batch = self.task.source, self.batch
        losses = [self.engine.evaluate(source.validation(number, self.rows), samples=batch) for number in range(count)]
        if remainder:
            try:
                last = self.engine.evaluate(source.validation(count, range(remainder)), is_global_batch=True)
            except (Infeasible, ModelError) as error:  # raised on every rank, before any communication
                say(f"the last {remainder} validation samples are left out: {error}")
            else:
                return (sum(losses) * batch + last * remainder) / (count * batch + remainder)
        return sum(losses) / count

    def _evaluate_gathered(self, count: int) -> float | None:
        state = self.engine.full_state_dict()
        if state is None:
            self.world.all_reduce_max([0])
            return None
        model = self.task.make()
        model.load_state_dict(state, strict=False)
        model.to(self.world.device).eval()
        with torch.no_grad():
            losses = [self._loss_of_batch(model, self.task.source.validation(number, range(self.batch))) for number in range(count)]
        self.world.all_reduce_max([0])  # the others wait
        return sum(losses) / count

    def _loss_of_batch(self, model: torch.nn.Module, batch: Any) -> float:
        if self.task.loss is not None:
            return float(self.task.loss(call_model(model, forward_arguments(model, batch)), batch))
        out = call_model(model, batch)
        return float(getattr(out, "loss", out))
