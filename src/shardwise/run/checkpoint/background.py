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

from shardwise.errors import CheckpointError
from shardwise.run.checkpoint import disk
from shardwise.run.checkpoint.agreement import RankAgreement, broadcast_from_first
from shardwise.run.checkpoint.folder import TEMPORARY, SavedCheckpoint, Warn, check_token, remove_old_checkpoints, size_of
from shardwise.run.checkpoint.save import SaveWork, commit_checkpoint, mark_name, prepare_folder, warn_in_python, write_part
from shardwise.run.checkpoint.state_shard import StateShard
from shardwise.units import format_bytes
from shardwise.world.comm.pending import synchronize_device
from shardwise.world.persistent_memory import padded_size

POLL_S = 0.02  # between rank 0's checks for markers
GRACE_S = 10.0  # for a save in progress when a run ends by an error


def host_copy_bytes(shards: Sequence[StateShard]) -> int:
    """Bytes of host memory for a copy of the shards that a rank owns."""
    return sum(padded_size(piece.tensor.nbytes) for piece in shards if piece.is_owner)


@dataclass(frozen=True)
class SaveTiming:
    """Duration of an asynchronous save: on rank 0 until the commit, elsewhere until this rank's file was on disk. `size_bytes`: of all
    files, on rank 0 only."""

    step: int
    seconds: float
    size_bytes: int = 0


class _SaveAbandoned(Exception):
    """Raised in the thread of a save that was abandoned."""


class BackgroundSaver:
    """Saves the checkpoints of one writer, one at a time; every rank builds one and makes the same calls. `keep`, `token`: as of `save`."""

    def __init__(
        self, folder: Path | str, ranks: RankAgreement, *, keep: int = 0, token: int | None = None, warn: Warn = warn_in_python
    ) -> None:
        self.folder, self.keep, self.token, self.warn = Path(folder), keep, token, warn
        self._ranks, self._host_copy = ranks, _HostCopy()
        self._in_progress: _SaveInProgress | None = None

    @property
    def step(self) -> int | None:
        """Step of the save in progress; None: there is none."""
        return self._in_progress.work.step if self._in_progress is not None else None

    def begin(self, step: int, shards: Sequence[StateShard], extra: dict[str, Any] | None = None) -> None:
        """Copy the shards and start writing in the background. Another save must not be in progress.

        Raises:
            CheckpointError: as `save`, for immediate failures.
        """
        assert self._in_progress is None
        work = SaveWork(self.folder, step, [piece for piece in shards if piece.is_owner], self._ranks)
        name = f"{TEMPORARY}{step:08d}-{broadcast_from_first(self._ranks, secrets.randbits(62)):016x}"
        save = _SaveInProgress(work, self.folder / name, extra or {}, self.token, self.keep)

        def prepare() -> list[Tensor]:
            if self._ranks.rank == 0:
                prepare_folder(self.folder, save.temporary, self.token, self.warn)
            return self._host_copy.copy_tensors(work.shards)

        try:
            save.start(work.run_on_ranks(prepare) or [])
        except CheckpointError:
            if self._ranks.rank == 0:
                disk.remove_tree(save.temporary)
            raise
        self._in_progress = save

    def vote(self) -> tuple[int, int]:
        """Return this rank's vote, whose maximum over ranks `apply_vote` takes: whether its part failed, and whether it still runs."""
        if (save := self._in_progress) is None:
            return 0, 0
        goes_on = not save.is_over.is_set()  # read first, since a failure also sets it
        return self._ranks.num_ranks - self._ranks.rank if save.failure is not None else 0, int(goes_on)

    def apply_vote(self, failed: int, is_running: int) -> SaveTiming | None:
        """Act on the maximum over ranks of `vote`: return the completed save, None if there is none.

        Raises:
            CheckpointError: on every rank, if any of them could not write.
        """
        save = self._in_progress
        if save is None or (is_running and not failed):
            return None
        return self._complete(save)

    def finish(self) -> SaveTiming | None:
        """Wait for the save in progress, if any. Raises as `apply_vote`."""
        save = self._in_progress
        if save is None:
            return None
        save.written.wait()
        self._raise_if_failed(save)
        save.all_written.set()  # rank 0 need not poll for markers
        save.is_over.wait()
        return self._complete(save)

    def _complete(self, save: _SaveInProgress) -> SaveTiming:
        self._raise_if_failed(save)
        self._in_progress = None
        for words in save.warnings:
            self.warn(words)
        return SaveTiming(save.work.step, save.seconds, save.size_bytes)

    def _raise_if_failed(self, save: _SaveInProgress) -> None:
        try:
            save.work.run_on_ranks(save.check)
        except CheckpointError:
            self._in_progress = None
            save.abandon()
            raise

    def abandon(self, wait: bool) -> None:
        """Abandon the save in progress, unless it is being committed; not collective. `wait`: first give it time to complete, if other
        ranks may still be alive."""
        save, self._in_progress = self._in_progress, None
        if save is None:
            return
        deadline_s = time.monotonic() + GRACE_S
        while wait and save.failure is None and save.temporary.exists() and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        save.abandon()


class _HostCopy:
    """Host buffer for the shards that a rank owns, reused from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy_tensors(self, shards: Sequence[StateShard]) -> list[Tensor]:
        """Copy the current tensors of the shards, in row-major order."""
        size, devices = host_copy_bytes(shards), {piece.tensor.device for piece in shards}
        pinned = any(device.type == "cuda" for device in devices)  # for asynchronous copies from a GPU
        if self._memory.numel() < size:
            try:
                self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as error:
                raise CheckpointError(f"there is no memory for a copy of the state, {format_bytes(size)}: {error}") from error
        copies, at = [], 0
        for piece in shards:
            x = piece.tensor
            copy = self._memory[at : at + x.nbytes].view(x.dtype).view(x.shape)
            copies.append(copy.copy_(x, non_blocking=pinned))
            at += padded_size(x.nbytes)
        for device in devices:
            synchronize_device(device)
        return copies


@dataclass(eq=False)
class _SaveInProgress:
    """A rank's part of one save, and on rank 0 the commit. Results of the thread are read after `is_over` is set."""

    work: SaveWork
    temporary: Path
    extra: dict[str, Any]
    token: int | None
    keep: int
    written: Event = field(default_factory=Event)  # this rank's part is written, or failed
    all_written: Event = field(default_factory=Event)  # all ranks' parts are written
    decided: Event = field(default_factory=Event)  # the commit succeeded or failed
    is_over: Event = field(default_factory=Event)
    failure: CheckpointError | None = None
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    size_bytes: int = 0
    _lock: Lock = field(default_factory=Lock)
    _is_abandoned: bool = False
    _is_committing: bool = False

    def start(self, copies: Sequence[Tensor]) -> None:
        Thread(target=self._run, args=(copies,), name="checkpoint", daemon=True).start()

    def check(self) -> None:
        """Raise this rank's failure, if any."""
        if self.failure is not None:
            raise self.failure

    def abandon(self) -> None:
        """Make the thread end soon, without a commit unless one has begun."""
        with self._lock:
            self._is_abandoned, commits = True, self._is_committing
        if commits:
            self.decided.wait()

    def _run(self, copies: Sequence[Tensor]) -> None:
        began, first = time.perf_counter(), self.work.ranks.rank == 0
        try:
            pieces = [replace(piece, tensor=copy) for piece, copy in zip(self.work.shards, copies, strict=True)]
            write_part(self.temporary, self.work.ranks.rank, pieces, self._check_abandoned)
            self.written.set()
            saved = self._commit_when_written() if first else None
            self.seconds = time.perf_counter() - began
            self.decided.set()
            if saved is not None and self.keep:
                remove_old_checkpoints(self.work.folder, self.keep, saved, self.warnings.append)
        except _SaveAbandoned:
            pass
        except Exception as error:  # any failure must be reported to the other ranks
            self.failure = self._explain(error)
        if first:
            disk.remove_tree(self.temporary)
        for event in (self.written, self.decided, self.is_over):
            event.set()

    def _commit_when_written(self) -> SavedCheckpoint:
        names = {mark_name(rank) for rank in range(self.work.ranks.num_ranks)}
        # By listing: network file systems cache that a name looked up too early does not exist.
        while not self.all_written.is_set() and not names <= set(os.listdir(self.temporary)):
            self._check_abandoned()
            self.all_written.wait(POLL_S)
        with self._lock:
            if self._is_abandoned:
                raise _SaveAbandoned
            self._is_committing = True
        saved = commit_checkpoint(self.temporary, self.work, self.extra, self.token)
        self.size_bytes = size_of(self.work.folder / saved.name)
        return saved

    def _check_abandoned(self) -> None:
        if self._is_abandoned:
            raise _SaveAbandoned

    def _explain(self, error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        if not isinstance(error, OSError):
            return CheckpointError(f"checkpoint of step {self.work.step} not saved: {type(error).__name__}: {error}")
        try:
            check_token(self.work.folder, self.token)  # another writer may have removed the temporary folder
        except (CheckpointError, OSError) as replaced:
            if isinstance(replaced, CheckpointError):
                return replaced
        return self.work.explain(error)
