"""Checkpoint saving of an engine, synchronous or in the background (asynchronous), in a format that any layout loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.run import checkpoint
from shardwise.world.world import World


class CheckpointMixin(ABC):
    """Adds `save`, `begin_save` and `finish_save` to a class with sharded state. `step_index`: number of completed steps."""

    world: World
    step_index: int

    @abstractmethod
    def state_shards(self, drain: bool = True) -> list[checkpoint.StateShard]:
        """Return this rank's shards of the state."""

    @cached_property
    def _background_save(self) -> checkpoint.BackgroundSaver:
        return checkpoint.BackgroundSaver(".", self.world)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None, keep: int = 0) -> Path:
        """Write a checkpoint into `folder`; every rank calls it. Any layout can load it. See `run/checkpoint/save`."""
        self.finish_save()
        return checkpoint.save(folder, self.step_index, self.state_shards(), extra, self.world, keep=keep)

    def begin_save(self, folder: str | Path, extra: dict[str, Any] | None = None, keep: int = 0) -> None:
        """Save asynchronously: return once the state is copied to host memory, and write files during the next steps. A failure is raised
        by the next save, or by `finish_save`, which must be called before the program ends."""
        self.finish_save()
        self._background_save.folder, self._background_save.keep = Path(folder), keep
        self._background_save.begin(self.step_index, self.state_shards(), extra)

    def finish_save(self) -> None:
        """Wait for the save that `begin_save` started, if any; every rank calls it. Raises CheckpointError if it failed."""
        self._background_save.finish()
