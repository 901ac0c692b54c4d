"""Checkpoint folder of a run: names, order, the writer's fencing token, retention.

`step-00000120` is committed and complete; `step-00000120.1` is a later one of the same step; names that begin with a dot are
being written, or were when their writer died. `fence.json` holds the token of the newest writer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.plan.ir.toml_text import parse_json
from shardwise.run.checkpoint import disk
from shardwise.run.checkpoint.manifest import MANIFEST, Manifest

_NAME = re.compile(r"step-(\d{8,12})(?:\.(\d{1,6}))?")
FENCE = "fence.json"
TEMPORARY = ".saving-"
CLAIMS, MAX_CLAIMS = "claims", 64
MAX_TOKEN = 2**62
Warn = Callable[[str], None]


class WriterReplaced(CheckpointError):
    """Another run has become the writer of this folder; this one must end."""


class FolderRemoved(CheckpointError):
    """The run's folder was removed, or belongs to another run; this one must end."""

    def __init__(self, what: Path | str) -> None:
        super().__init__(
            f"{what} was removed while the run went on, with all checkpoints in it; begin a new run, and leave its folder in place until "
            "it has ended"
            if isinstance(what, Path)
            else what
        )


@dataclass(frozen=True, slots=True, order=True)
class SavedCheckpoint:
    """A committed checkpoint, ordered by age: step, then attempt."""

    step: int
    attempt: int

    @property
    def name(self) -> str:
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")

    @classmethod
    def parse(cls, name: str) -> SavedCheckpoint | None:
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), int(match[2] or 0)) if match else None


def committed_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Return the committed checkpoints of a folder, oldest first, damaged ones included; links are not followed."""
    if not folder.is_dir():
        return []
    saves = (SavedCheckpoint.parse(path.name) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(saved for saved in saves if saved)


def next_name(folder: Path, step: int) -> SavedCheckpoint:
    """Return an unused name for a checkpoint of `step`; a committed one is never replaced."""
    taken = [saved.attempt for saved in committed_checkpoints(folder) if saved.step == step]
    return SavedCheckpoint(step, max(taken, default=-1) + 1)


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of one checkpoint, without its files' digests.

    Raises:
        CheckpointError: missing or damaged.
    """
    return Manifest.parse(disk.read_regular(path / MANIFEST), str(path / MANIFEST))


def size_of(path: Path) -> int:
    """Bytes of the files of one checkpoint."""
    return sum(entry.stat().st_size for entry in os.scandir(path))


def token_of(folder: Path) -> int:
    """Return the newest writer's token, 0 if the folder was never claimed.

    Raises:
        CheckpointError: the fence is damaged.
    """
    path = folder / FENCE
    if not path.exists():
        return 0
    try:
        token = parse_json(disk.read_regular(path))["token"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged; if no other run writes here, remove it") from error
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < MAX_TOKEN:
        damage = f"{path} is damaged: token {str(token)[:40]} is no number from 0 to 2^62"
        raise CheckpointError(f"{damage}; if no other run writes here, remove it")
    return token


def claim_folder(folder: Path) -> int:
    """Become the writer of a folder; earlier writers can commit nothing more. Call it on rank 0. Returns the token for `save`.

    A writer that was cut off (a partition, a paused host) finds a higher token at its next commit and is refused.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        token = _claim_token(folder, token_of(folder) + 1)
        disk.replace_file(folder / FENCE, json.dumps({"token": token}).encode())
    except OSError as error:
        raise CheckpointError(f"checkpoints: {disk.explain_os_error(error, folder, 0)}") from error
    return token


def _claim_token(folder: Path, token: int) -> int:
    """Return the first free token from `token` on; concurrent writers get different ones, by exclusive creation of a file per token."""
    (folder / CLAIMS).mkdir(exist_ok=True)
    while True:
        try:
            os.close(os.open(folder / CLAIMS / f"{token:08d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            token += 1
            continue
        for old in sorted((folder / CLAIMS).iterdir())[:-MAX_CLAIMS]:
            old.unlink(missing_ok=True)
        return token


def recreate_folder(folder: Path, token: int, warn: Warn) -> None:
    """Recreate a folder that was removed while its writer, `token`, is running.

    Raises:
        WriterReplaced: another writer recreated it first. FolderRemoved: its parent folder was removed, too.
    """
    if (folder / FENCE).exists():
        return
    try:
        folder.mkdir(exist_ok=True)
        (folder / CLAIMS).mkdir(exist_ok=True)
    except FileNotFoundError as error:
        raise FolderRemoved(folder.parent) from error
    try:
        os.close(os.open(folder / CLAIMS / f"{token:08d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        check_token(folder, token)
    disk.replace_file(folder / FENCE, json.dumps({"token": token}).encode())
    warn(f"{folder} was removed while the run went on; it is made anew, and the checkpoints that were in it are lost")


def check_token(folder: Path, token: int | None) -> None:
    """Raise WriterReplaced if another writer claimed the folder. `token` None: a writer that never claimed it."""
    if token is not None and (newest := token_of(folder)) not in (token, 0):
        raise WriterReplaced(
            f"writer {token} of {folder} has been replaced by writer {newest}: another run took over this folder, so this one must end"
        )


def remove_old_checkpoints(folder: Path, keep: int, good: SavedCheckpoint, warn: Warn) -> None:
    """Remove all but the newest `keep` checkpoints, and never `good`, the one just written and known to be complete."""
    for saved in committed_checkpoints(folder)[:-keep] if keep else []:
        if saved == good:
            continue
        # Renamed first, so that a partly removed checkpoint is never visible.
        hidden = folder / f"{TEMPORARY}old-{saved.name}"
        try:
            (folder / saved.name).rename(hidden)
        except OSError as error:
            warn(f"old checkpoint {folder / saved.name} stays: {error.strerror}")
            continue
        disk.remove_tree(hidden)


def remove_temporary_folders(folder: Path) -> None:
    """Remove temporary folders of dead writers."""
    for path in folder.glob(f"{TEMPORARY}*"):
        disk.remove_tree(path)
