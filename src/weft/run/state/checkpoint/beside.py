"""Asynchronous checkpointing in a background thread. In: the state's shards at a step. Out: the checkpoint that `save` would write.

Every rank copies its shards to host memory; from then on the state may change. A thread of each rank writes the copy into the temporary
folder, then a marker file. Rank 0's thread waits for all markers, and commits in the order of `save`. Ranks learn the outcome from
`apply_vote`, in a vote that they hold anyway, or from `finish`, which waits. A process that dies before the rename leaves a hidden folder,
which the next save removes. Folder names are unique, so that an abandoned thread never writes into another save.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.run.state.checkpoint import disk
from weft.run.state.checkpoint.folder import TEMPORARY, Saved, Warn, check_token, retain, size_of
from weft.run.state.checkpoint.piece import Piece
from weft.run.state.checkpoint.save import Work, begin, commit, mark_of, warn_python, write_part
from weft.run.state.checkpoint.together import Together, from_first
from weft.units import format_bytes
from weft.world.kept import padded
from weft.world.pending import synchronize

POLL_S = 0.02  # between rank 0's checks for markers
GRACE_S = 10.0  # for a save in progress when a run ends by an error


def copy_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of host memory for a copy of the shards that a rank owns."""
    return sum(padded(piece.tensor.nbytes) for piece in pieces if piece.owner)


@dataclass(frozen=True)
class Written:
    """Duration of an asynchronous save: on rank 0 until the commit, elsewhere until this rank's file was on disk. `size_bytes`: of all
    files, on rank 0 only."""

    step: int
    seconds: float
    size_bytes: int = 0


class _Left(Exception):
    """Raised in the thread of a save that was abandoned."""


class Beside:
    """Saves the checkpoints of one writer, one at a time; every rank builds one and makes the same calls. `keep`, `token`: as of `save`."""

    def __init__(
        self, folder: Path | str, together: Together, *, keep: int = 0, token: int | None = None, warn: Warn = warn_python
    ) -> None:
        self.folder, self.keep, self.token, self.warn = Path(folder), keep, token, warn
        self._together, self._copy = together, _Copy()
        self._one: _UnderWay | None = None

    @property
    def step(self) -> int | None:
        """Step of the save in progress; None: there is none."""
        return self._one.work.step if self._one is not None else None

    def begin(self, step: int, pieces: Sequence[Piece], extra: dict[str, Any] | None = None) -> None:
        """Copy the shards and start writing in the background. Another save must not be in progress.

        Raises:
            CheckpointError: as `save`, for immediate failures.
        """
        assert self._one is None
        work = Work(self.folder, step, [piece for piece in pieces if piece.owner], self._together)
        name = f"{TEMPORARY}{step:08d}-{from_first(self._together, secrets.randbits(62)):016x}"
        save = _UnderWay(work, self.folder / name, extra or {}, self.token, self.keep)

        def prepare() -> list[Tensor]:
            if self._together.rank == 0:
                begin(self.folder, save.temporary, self.token, self.warn)
            return self._copy.of(work.pieces)

        try:
            save.start(work.do(prepare) or [])
        except CheckpointError:
            if self._together.rank == 0:
                disk.remove_tree(save.temporary)
            raise
        self._one = save

    def mark(self) -> tuple[int, int]:
        """Return this rank's vote, whose maximum over ranks `apply_vote` takes: whether its part failed, and whether it still runs."""
        if (save := self._one) is None:
            return 0, 0
        goes_on = not save.over.is_set()  # read first, since a failure also sets it
        return self._together.num_ranks - self._together.rank if save.failure is not None else 0, int(goes_on)

    def heed(self, failed: int, goes_on: int) -> Written | None:
        """Act on the maximum over ranks of `vote`: return the completed save, None if there is none.

        Raises:
            CheckpointError: on every rank, if any of them could not write.
        """
        save = self._one
        if save is None or (goes_on and not failed):
            return None
        return self._ended(save)

    def finish(self) -> Written | None:
        """Wait for the save in progress, if any. Raises as `apply_vote`."""
        save = self._one
        if save is None:
            return None
        save.written.wait()
        self._agreed(save)
        save.told.set()  # rank 0 need not poll for markers
        save.over.wait()
        return self._ended(save)

    def _ended(self, one: _UnderWay) -> Written:
        self._agreed(one)
        self._one = None
        for words in one.said:
            self.warn(words)
        return Written(one.work.step, one.seconds, one.size_bytes)

    def _agreed(self, one: _UnderWay) -> None:
        try:
            one.work.do(one.check)
        except CheckpointError:
            self._one = None
            one.leave()
            raise

    def leave(self, wait: bool) -> None:
        """Abandon the save in progress, unless it is being committed; not collective. `wait`: first give it time to complete, if other
        ranks may still be alive."""
        save, self._one = self._one, None
        if save is None:
            return
        deadline_s = time.monotonic() + GRACE_S
        while wait and save.failure is None and save.temporary.exists() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        save.leave()


class _Copy:
    """Host buffer for the shards that a rank owns, reused from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def of(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Copy the current tensors of the shards, in row-major order."""
        size, devices = copy_bytes(pieces), {piece.tensor.device for piece in pieces}
        pinned = any(device.type == "cuda" for device in devices)  # for asynchronous copies from a GPU
        if self._memory.numel() < size:
            try:
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as error:
                raise CheckpointError(f"there is no memory for a copy of the state, {format_bytes(size)}: {error}") from error
        copies, at = [], 0
        for piece in pieces:
            x = piece.tensor
            copy = self._memory[at : at + x.nbytes].view(x.dtype).view(x.shape)
            copies.append(copy.copy_(x, non_blocking=pinned))
            at += padded(x.nbytes)
        for device in devices:
            synchronize(device)
        return copies


@dataclass(eq=False)
class _UnderWay:
    """A rank's part of one save, and on rank 0 the commit. Results of the thread are read after `is_over` is set."""

    work: Work
    temporary: Path
    extra: dict[str, Any]
    token: int | None
    keep: int
    written: Event = field(default_factory=Event)  # this rank's part is written, or failed
    told: Event = field(default_factory=Event)  # all ranks' parts are written
    decided: Event = field(default_factory=Event)  # the commit succeeded or failed
    over: Event = field(default_factory=Event)
    failure: CheckpointError | None = None
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0
    size_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)
    _is_left: bool = False
    _commits: bool = False

    def start(self, copies: Sequence[Tensor]) -> None:
        Thread(target=self._run, args=(copies,), name="checkpoint", daemon=True).start()

    def check(self) -> None:
        """Raise this rank's failure, if any."""
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        """Make the thread end soon, without a commit unless one has begun."""
        with self._lock:
            self._is_left, commits = True, self._commits
        if commits:
            self.decided.wait()

    def _run(self, copies: Sequence[Tensor]) -> None:
        began, first = time.perf_counter(), self.work.together.rank == 0
        try:
            pieces = [replace(piece, tensor=copy) for piece, copy in zip(self.work.pieces, copies, strict=True)]
            write_part(self.temporary, self.work.together.rank, pieces, self._go_on)
            self.written.set()
            saved = self._committed() if first else None
            self.seconds = time.perf_counter() - began
            self.decided.set()
            if saved is not None and self.keep:
                retain(self.work.folder, self.keep, saved, self.said.append)
        except _Left:
            pass
        except Exception as error:  # any failure must be reported to the other ranks
            self.failure = self._explained(error)
        if first:
            disk.remove_tree(self.temporary)
        for event in (self.written, self.decided, self.over):
            event.set()

    def _committed(self) -> Saved:
        names = {mark_of(rank) for rank in range(self.work.together.num_ranks)}
        # By listing: network file systems cache that a name looked up too early does not exist.
        while not self.told.is_set() and not names <= set(os.listdir(self.temporary)):
            self._go_on()
            self.told.wait(POLL_S)
        with self._lock:
            if self._is_left:
                raise _Left
            self._commits = True
        saved = commit(self.temporary, self.work, self.extra, self.token)
        self.size_bytes = size_of(self.work.folder / saved.name)
        return saved

    def _go_on(self) -> None:
        if self._is_left:
            raise _Left

    def _explained(self, error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        if not isinstance(error, OSError):
            return CheckpointError(f"checkpoint of step {self.work.step} not saved: {type(error).__name__}: {error}")
        try:
            check_token(self.work.folder, self.token)  # another writer may have removed the temporary folder
        except (CheckpointError, OSError) as replaced:
            if isinstance(replaced, CheckpointError):
                return replaced
        return self.work.explained(error)
