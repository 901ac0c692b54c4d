"""Saving while training goes on. In: the state's pieces at a step. Out: the checkpoint that `save` would have written, a while later.

Every rank copies its pieces into memory of its own; from then on the state may change. A thread of each writes the copy into the temporary
folder, and leaves its mark there. Rank 0's then waits for all marks, and commits in the order of `save`. What became of it ranks learn from
`heed`, where they agree about other things anyway, or from `finish`, which waits. Whoever dies before the rename leaves a folder with a
hidden name, which the next save sweeps. No name comes twice, so that a thread that was left behind writes into no other save.
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

POLL_S = 0.02  # in which rank 0 looks for the marks of the others
GRACE_S = 10.0  # that a run which ends by an error gives a save under way


def copy_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of host memory for a copy of what a rank owns of `pieces`."""
    return sum(padded(piece.tensor.nbytes) for piece in pieces if piece.owner)


@dataclass(frozen=True)
class Written:
    """What saving took behind a run's back: on rank 0 until the commit, elsewhere until this rank's file was on the disk. `size_bytes`: of
    all files, on rank 0 alone."""

    step: int
    seconds: float
    size_bytes: int = 0


class _Left(Exception):
    """Nobody wants this save any more."""


class Beside:
    """The checkpoints of one writer, one at a time; every rank makes one and calls the same. `keep`, `token`: as of `save`."""

    def __init__(
        self, folder: Path | str, together: Together, *, keep: int = 0, token: int | None = None, warn: Warn = warn_python
    ) -> None:
        self.folder, self.keep, self.token, self.warn = Path(folder), keep, token, warn
        self._together, self._copy = together, _Copy()
        self._one: _UnderWay | None = None

    @property
    def step(self) -> int | None:
        """The step of the save under way; None: there is none."""
        return self._one.work.step if self._one is not None else None

    def begin(self, step: int, pieces: Sequence[Piece], extra: dict[str, Any] | None = None) -> None:
        """Copy `pieces`; the rest is done while the caller goes on. Another save must not be under way.

        Raises:
            CheckpointError: as `save` does, of what goes wrong at once.
        """
        assert self._one is None
        work = Work(self.folder, step, [piece for piece in pieces if piece.owner], self._together)
        name = f"{TEMPORARY}{step:08d}-{from_first(self._together, secrets.randbits(62)):016x}"
        one = _UnderWay(work, self.folder / name, extra or {}, self.token, self.keep)

        def prepare() -> list[Tensor]:
            if self._together.rank == 0:
                begin(self.folder, one.temporary, self.token, self.warn)
            return self._copy.of(work.pieces)

        try:
            one.start(work.do(prepare) or [])
        except CheckpointError:
            if self._together.rank == 0:
                disk.remove_tree(one.temporary)
            raise
        self._one = one

    def mark(self) -> tuple[int, int]:
        """What this rank adds to what ranks agree about, whose maximum `heed` takes: whether its part failed, and whether it goes on."""
        if (one := self._one) is None:
            return 0, 0
        goes_on = not one.over.is_set()  # looked at first: what failed is over
        return self._together.num_ranks - self._together.rank if one.failure is not None else 0, int(goes_on)

    def heed(self, failed: int, goes_on: int) -> Written | None:
        """What the maximum over ranks of `mark` says: the save that is done, None where there is none.

        Raises:
            CheckpointError: on every rank, where one of them could not write.
        """
        one = self._one
        if one is None or (goes_on and not failed):
            return None
        return self._ended(one)

    def finish(self) -> Written | None:
        """Wait for the save under way, if there is one. Raises as `heed`."""
        one = self._one
        if one is None:
            return None
        one.written.wait()
        self._agreed(one)
        one.told.set()  # marks need not be looked for
        one.over.wait()
        return self._ended(one)

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
        """No rank has to call this: give the save under way up, unless it is being committed. `wait`: with time to become a checkpoint,
        where the other ranks may be there."""
        one, self._one = self._one, None
        if one is None:
            return
        until = time.monotonic() + GRACE_S
        while wait and one.failure is None and one.temporary.exists() and time.monotonic() < until:
            time.sleep(POLL_S)
        one.leave()


class _Copy:
    """Memory of the host for what a rank owns, kept from save to save."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def of(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """The tensors of `pieces` as they are now, in row-major order."""
        size, devices = copy_bytes(pieces), {piece.tensor.device for piece in pieces}
        pinned = any(device.type == "cuda" for device in devices)  # which a GPU writes to by itself
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
    """A rank's part of one save, and on rank 0 the commit. What the thread leaves is read once `over` is set."""

    work: Work
    temporary: Path
    extra: dict[str, Any]
    token: int | None
    keep: int
    written: Event = field(default_factory=Event)  # this rank's part, or it failed
    told: Event = field(default_factory=Event)  # that all ranks have
    decided: Event = field(default_factory=Event)  # the commit, either way
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
        """Raises what went wrong here."""
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        """The thread ends soon, and commits nothing unless it has begun to."""
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
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self.failure = self._explained(error)
        if first:
            disk.remove_tree(self.temporary)
        for event in (self.written, self.decided, self.over):
            event.set()

    def _committed(self) -> Saved:
        names = {mark_of(rank) for rank in range(self.work.together.num_ranks)}
        # Listed, since a name that was looked for too early would stay unknown to a network file system for a while.
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
            check_token(self.work.folder, self.token)  # another writer sweeps what this one has begun
        except (CheckpointError, OSError) as replaced:
            if isinstance(replaced, CheckpointError):
                return replaced
        return self.work.explained(error)
