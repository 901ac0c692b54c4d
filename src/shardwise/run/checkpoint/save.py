"""Save a sharded checkpoint: every rank writes its shards, rank 0 commits atomically by a rename. Out: a new folder, or none.

Order (each step durable before the next): files, manifest, folder, rename, parent folder; only then old checkpoints are removed. So
whenever a process or the machine dies, every folder with a committed name is complete. Several hosts need a shared file system.
`background` does the same asynchronously, during training.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardwise.errors import CheckpointError
from shardwise.run.checkpoint import disk
from shardwise.run.checkpoint.agreement import RankAgreement, SingleRank, broadcast_from_first, first_failed
from shardwise.run.checkpoint.folder import (
    TEMPORARY,
    FolderRemoved,
    SavedCheckpoint,
    Warn,
    WriterReplaced,
    check_token,
    next_name,
    recreate_folder,
    remove_old_checkpoints,
    remove_temporary_folders,
)
from shardwise.run.checkpoint.manifest import MANIFEST, Manifest, StoredFile, StoredTensor, model_fingerprint
from shardwise.run.checkpoint.state_shard import StateShard, key_label
from shardwise.run.checkpoint.tensorfile import write_shards

T = TypeVar("T")
_ERRORS_BY_NAME = {kind.__name__: kind for kind in (CheckpointError, WriterReplaced, FolderRemoved)}


@dataclass(frozen=True)
class _RankPart:
    """File and tensors that one rank wrote."""

    file: StoredFile | None  # None: this rank owns nothing
    tensors: list[StoredTensor]


_RANK_PART = TypeAdapter(_RankPart)


def warn_in_python(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def save(
    folder: Path | str,
    step: int,
    shards: Sequence[StateShard],
    extra: dict[str, Any] | None = None,
    ranks: RankAgreement | None = None,
    *,
    keep: int = 0,
    token: int | None = None,
    warn: Warn = warn_in_python,
) -> Path:
    """Write a checkpoint `folder/step-00000120`; every rank calls it, with its own shards. Returns its path.

    `extra`: JSON values of rank 0. `keep`: number of newest checkpoints to retain, 0 for all. `token`: from `claim_folder`; a writer whose
    token is no longer the folder's is refused.

    Raises:
        CheckpointError: on every rank, if one cannot write (full, read-only) or the shards do not cover their tensors;
            `WriterReplaced` if another writer has taken over. Nothing visible is left, and earlier checkpoints are untouched.

    >>> import tempfile, torch
    >>> from shardwise.run.checkpoint import load, full_shard
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(folder, 7, [full_shard("w", "parameter", torch.ones(2))], {"seed": 1})
    ...     into = torch.zeros(2)
    ...     load(folder, [full_shard("w", "parameter", into)]), into
    ({'seed': 1, 'step': 7}, tensor([1., 1.]))
    """
    folder, ranks = Path(folder), ranks or SingleRank()
    work = SaveWork(folder, step, [piece for piece in shards if piece.is_owner], ranks)
    temporary = folder / f"{TEMPORARY}{step:08d}-{broadcast_from_first(ranks, token or 0)}"
    work.run_on_ranks(lambda: prepare_folder(folder, temporary, token, warn), first_only=True)
    try:
        work.run_on_ranks(lambda: write_part(temporary, ranks.rank, work.shards))
        saved = work.run_on_ranks(lambda: commit_checkpoint(temporary, work, extra or {}, token), first_only=True)
    except CheckpointError:
        if ranks.rank == 0:
            disk.remove_tree(temporary)
        raise
    if saved is not None and keep:
        remove_old_checkpoints(folder, keep, saved, warn)
    return folder / SavedCheckpoint(step, broadcast_from_first(ranks, saved.attempt if saved else 0)).name


class SaveWork:
    """Runs the phases of a save on all ranks; a failure on one rank is raised on all."""

    def __init__(self, folder: Path, step: int, shards: Sequence[StateShard], ranks: RankAgreement) -> None:
        self.folder, self.step, self.shards, self.ranks = folder, step, shards, ranks

    def run_on_ranks(self, work: Callable[[], T], first_only: bool = False) -> T | None:
        failure: CheckpointError | None = None
        result = None
        if not first_only or self.ranks.rank == 0:
            try:
                result = work()
            except CheckpointError as error:
                failure = error
            except OSError as error:
                failure = self.explain(error)
                failure.__cause__ = error
        failed = first_failed(self.ranks, f"{type(failure).__name__}: {failure}" if failure is not None else "")
        if failure is not None:
            raise failure
        if failed:
            rank, (kind, _, why) = failed[0], failed[1].partition(": ")
            failure = _ERRORS_BY_NAME.get(kind, CheckpointError)(f"rank {rank}: {why}")
            failure.second_hand = True
            raise failure
        return result

    def explain(self, error: OSError) -> CheckpointError:
        """Return the error that says why nothing was saved."""
        need = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.shards)
        return CheckpointError(f"checkpoint of step {self.step} not saved: {disk.explain_os_error(error, self.folder, need)}")


def prepare_folder(folder: Path, temporary: Path, token: int | None, warn: Warn) -> None:
    """Create the temporary folder that all ranks write into; called on rank 0."""
    if token is None:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        recreate_folder(folder, token, warn)
    check_token(folder, token)
    remove_temporary_folders(folder)
    temporary.mkdir()


def _rank_file_stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def mark_name(rank: int) -> str:
    """Return the name of the marker file that a rank writes once its file is durable."""
    return f"{_rank_file_stem(rank)}.json"


def write_part(temporary: Path, rank: int, shards: Sequence[StateShard], check: Callable[[], None] = lambda: None) -> None:
    """Write a rank's file, then its marker. `check` is called before each shard, and may raise."""
    part = _RankPart(*write_shards(temporary / f"{_rank_file_stem(rank)}.safetensors", shards, check)) if shards else _RankPart(None, [])
    unfinished = temporary / f".{mark_name(rank)}"
    unfinished.write_bytes(_RANK_PART.dump_json(part))
    os.rename(unfinished, temporary / mark_name(rank))


def commit_checkpoint(temporary: Path, work: SaveWork, extra: dict[str, Any], token: int | None) -> SavedCheckpoint:
    """Commit the checkpoint under its final name; called on rank 0, once all ranks have written their markers."""
    folder, step, together = work.folder, work.step, work.ranks
    files, tensors = _join_parts(_read_parts(temporary, together.num_ranks))
    manifest = Manifest(
        step=step,
        token=token or 0,
        generation=together.generation,
        num_ranks=together.num_ranks,
        fingerprint=model_fingerprint(tensors),
        files=files,
        tensors=tensors,
        extra=extra,
    )
    data = manifest.dump()
    Manifest.parse(data, "this checkpoint")  # do not commit what `load` would reject
    disk.write_file(temporary / MANIFEST, [data])
    disk.fsync_folder(temporary)
    check_token(folder, token)
    saved = next_name(folder, step)
    os.rename(temporary, folder / saved.name)
    disk.fsync_folder(folder)
    return saved


def _read_parts(temporary: Path, num_ranks: int) -> list[_RankPart]:
    parts = []
    for rank in range(num_ranks):
        path = temporary / mark_name(rank)
        try:
            parts.append(_RANK_PART.validate_json(path.read_bytes()))
        except (FileNotFoundError, ValidationError) as error:
            raise CheckpointError(
                f"rank {rank}'s part of the checkpoint is not in {temporary.parent}; several hosts need a folder that all of them share"
            ) from error
        path.unlink()
    return parts


def _join_parts(parts: Sequence[_RankPart]) -> tuple[list[StoredFile], list[StoredTensor]]:
    """Merge the parts of all ranks: their files, and one entry for each global tensor with its shards."""
    files: list[StoredFile] = []
    by_key: dict[tuple[str, str, str], StoredTensor] = {}
    for part in parts:
        for tensor in part.tensors:
            first = by_key.setdefault(tensor.key, tensor.model_copy(update={"pieces": []}))
            if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{key_label(tensor.key)} is {first.dtype}{first.shape} on one rank and {tensor.dtype}{tensor.shape} on another"
                )
            first.pieces.extend(piece.model_copy(update={"file": len(files)}) for piece in tensor.pieces)
        if part.file is not None:
            files.append(part.file)
    return files, sorted(by_key.values(), key=lambda tensor: tensor.key)
