"""State of an engine: its shards on this rank, the full state dict, and checkpoints in a format that any layout loads.

Checkpoints are saved synchronously or in the background (asynchronously).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.plan import Plan
from shardwise.run import checkpoint
from shardwise.run.gradients.error_feedback import ErrorFeedbackState
from shardwise.run.gradients.parameter_servers import ParameterServers
from shardwise.run.gradients.stale_updates import StaleUpdates
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.publish import Address, publish_weights
from shardwise.run.recovery.fingerprints import Fingerprints
from shardwise.run.recovery.snapshots import RankState
from shardwise.run.residency.weight_gatherer import WeightGatherer
from shardwise.run.sharded_state import checkpoint_shards, full_state, rank_state, skip_shards
from shardwise.run.state.optimizer import Optimizer
from shardwise.run.state.precision import LossScale
from shardwise.run.step.interruption import WholeSteps
from shardwise.world.memory import Accounts
from shardwise.world.world import Group, World


class CheckpointMixin:
    """Adds what saves and loads state to a class with sharded state. `step_index`: number of completed steps."""

    plan: Plan
    world: World
    mesh: Mesh
    memory: Accounts
    rank_model: RankModel
    loss_scale: LossScale
    step_index: int
    _world_group: Group
    _counters: dict[str, Tensor]
    _optimizer: Optimizer
    _stale: StaleUpdates | ParameterServers | None
    _residuals: ErrorFeedbackState
    _fingerprints: Fingerprints
    _weight_gatherer: WeightGatherer

    def publish(self, to: Sequence[Address]) -> int:
        """Send the weights to serving replicas, without a file; every rank calls it. Returns bytes sent. See `run/publish`."""
        self.whole_steps.check()
        return publish_weights(self.state_shards(), to, self._world_group, self.step_index)

    def refresh_parameter_copies(self) -> None:
        """Copy weights that were written from outside to the optimizer's own copies, which it has with offload."""
        self._weight_gatherer.deferred.wait()
        self._optimizer.load_parameters()

    @cached_property
    def whole_steps(self) -> WholeSteps:
        """Guard against interruptions, which checks that the state is that of a whole number of steps."""
        return WholeSteps(self.world.num_ranks > 1 or bool(self.rank_model.buffers))

    def drain(self) -> None:
        """Read what the last step's message says of the weights. With staleness: apply all pending updates, so that weights include all
        completed steps. Every rank calls it, or none."""
        self._fingerprints.finish()
        if self._stale is not None:
            with self.memory.with_out_of_memory_error(self.world.rank):
                self._stale.drain()

    def state_shards(self, drain: bool = True) -> list[checkpoint.StateShard]:
        """Return this rank's parameters, buffers, optimizer state, counters and compression residuals, for checkpoints.

        Pending updates are applied first, unless `drain` is False.
        """
        if drain:
            self.drain()
        self._weight_gatherer.deferred.wait()
        pieces = self._model_shards()
        if self.plan.layout.servers and not drain:  # whose state is ahead of the weights
            pieces = [piece for piece in pieces if piece.kind != "optimizer" or not self.plan.layout.staleness]
        return [
            *pieces,
            *self._residuals.state_shards(self.step_index),
            *self.loss_scale.state_shards(self.step_index, self.world.rank == 0),
            *skip_shards(self._optimizer.skip_state(), self.mesh.coordinates(self.world.rank)),
        ]

    def _model_shards(self) -> list[checkpoint.StateShard]:
        """Return this rank's parameters, buffers, optimizer state and counters."""
        counters, coordinates = self._counters | self._optimizer.counters, self.mesh.coordinates(self.world.rank)
        return checkpoint_shards(self.rank_model, self._optimizer, coordinates, counters)

    def state(self) -> RankState:
        """Return this rank's state: the tensors themselves, not copies. Updates wait for their gathers from now on."""
        self._weight_gatherer.deferred.disable()
        other_tensors = (*self._residuals.tensors, *self.loss_scale.tensors, *self._counters.values())
        return rank_state(self.rank_model, self._optimizer, other_tensors, is_served=self.plan.layout.servers > 0)

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """Return the full state dict under the model's own names (tied tensors under each of theirs) on rank 0; None elsewhere."""
        self.whole_steps.check()
        return full_state(self.rank_model, self.state_shards(), self._world_group)

    @cached_property
    def _background_save(self) -> checkpoint.BackgroundSaver:
        return checkpoint.BackgroundSaver(".", self.world)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None, keep: int = 0) -> Path:
        """Write a checkpoint into `folder`; every rank calls it. Any layout can load it. See `run/checkpoint/save`."""
        self.whole_steps.check()
        self.finish_save()
        return checkpoint.save(folder, self.step_index, self.state_shards(), extra, self.world, keep=keep)

    def begin_save(self, folder: str | Path, extra: dict[str, Any] | None = None, keep: int = 0) -> None:
        """Save asynchronously: return once the state is copied to host memory, and write files during the next steps. A failure is raised
        by the next save, or by `finish_save`, which must be called before the program ends."""
        self.whole_steps.check()
        self.finish_save()
        self._background_save.folder, self._background_save.keep = Path(folder), keep
        self._background_save.begin(self.step_index, self.state_shards(), extra)

    def finish_save(self) -> None:
        """Wait for the save that `begin_save` started, if any; every rank calls it. Raises CheckpointError if it failed."""
        self._background_save.finish()

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint (or the newest good one of a folder), whatever layout wrote it. Returns its `extra`.

        Raises:
            CheckpointError: nothing to load, damaged, or of another model; then nothing has been changed.
        """
        if self.plan.layout.servers:  # which may be updating
            self.drain()
        self._weight_gatherer.deferred.wait()
        wanted = self._model_shards()
        optional = [*self._residuals.state_shards(-1), *self.loss_scale.state_shards(-1, self.world.rank == 0)]
        skips = self._optimizer.empty_skip_state(self.rank_model.trained_names)
        optional += skip_shards(skips, self.mesh.coordinates(self.world.rank))
        extra = checkpoint.load(folder, [*wanted, *optional], self.world)
        self._fingerprints.forget()
        if self._stale is not None:
            self._stale.discard_pending()
        self._optimizer.after_load()
        self.step_index = int(self._counters["step"])
        self._residuals.finish_load(self.step_index)
        self.loss_scale.after_load(self.step_index)
        num_updates = self.step_index - self.loss_scale.num_skipped
        self._optimizer.set_steps(num_updates)
        self._optimizer.set_skip_state(skips, num_updates)
        self.whole_steps.mark_whole()
        return extra
