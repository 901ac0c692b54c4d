"""How an engine saves. In: the pieces of its state after a step. Out: a checkpoint that any layout loads, at once or while steps go on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from weft.run.state import checkpoint
from weft.world.world import World


class Saves(ABC):
    """What has a state that ranks save together. `step_index`: steps that have been made."""

    world: World
    step_index: int

    @abstractmethod
    def pieces(self, drain: bool = True) -> list[checkpoint.Piece]:
        """This rank's part of the state."""

    @cached_property
    def _beside(self) -> checkpoint.Beside:
        return checkpoint.Beside(".", self.world)

    def save(self, folder: str | Path, extra: dict[str, Any] | None = None, keep: int = 0) -> Path:
        """Write a checkpoint into `folder`; every rank calls it. Any layout can load it. See `run/state/checkpoint/save`."""
        self.finish_save()
        return checkpoint.save(folder, self.step_index, self.pieces(), extra, self.world, keep=keep)

    def begin_save(self, folder: str | Path, extra: dict[str, Any] | None = None, keep: int = 0) -> None:
        """As `save`, but return once the state is copied into the host's memory: files are written while the next steps are made. What goes
        wrong then is raised by the next save, or by `finish_save`, which is to be called before the program ends."""
        self.finish_save()
        self._beside.folder, self._beside.keep = Path(folder), keep
        self._beside.begin(self.step_index, self.pieces(), extra)

    def finish_save(self) -> None:
        """Wait for the checkpoint that `begin_save` began, if there is one; every rank calls it. Raises CheckpointError where it failed."""
        self._beside.finish()
