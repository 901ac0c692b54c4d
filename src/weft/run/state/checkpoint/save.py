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

from weft.errors import CheckpointError
from weft.run.state.checkpoint import disk
from weft.run.state.checkpoint.folder import TEMPORARY, Removed, Replaced, Saved, Warn, check_token, claim_again, next_name, retain, sweep
from weft.run.state.checkpoint.manifest import MANIFEST, Manifest, StoredFile, StoredTensor, fingerprint
from weft.run.state.checkpoint.piece import Piece, label
from weft.run.state.checkpoint.tensorfile import write_pieces
from weft.run.state.checkpoint.together import Alone, Together, first_failed, from_first

T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (CheckpointError, Replaced, Removed)}


@dataclass(frozen=True)
class _Part:
    """File and tensors that one rank wrote."""

    file: StoredFile | None  # None: this rank owns nothing
    tensors: list[StoredTensor]


_PART = TypeAdapter(_Part)


def warn_python(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def save(
    folder: Path | str,
    step: int,
    pieces: Sequence[Piece],
    extra: dict[str, Any] | None = None,
    together: Together | None = None,
    *,
    keep: int = 0,
    token: int | None = None,
    warn: Warn = warn_python,
) -> Path:
    """Write a checkpoint `folder/step-00000120`; every rank calls it, with its own shards. Returns its path.

    `extra`: JSON values of rank 0. `keep`: number of newest checkpoints to retain, 0 for all. `token`: from `claim_folder`; a writer whose
    token is no longer the folder's is refused.

    Raises:
        CheckpointError: on every rank, if one cannot write (full, read-only) or the shards do not cover their tensors;
            `WriterReplaced` if another writer has taken over. Nothing visible is left, and earlier checkpoints are untouched.

    >>> import tempfile, torch
    >>> from weft.run.state.checkpoint import load, full_piece
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = save(folder, 7, [full_piece("w", "parameter", torch.ones(2))], {"seed": 1})
    ...     into = torch.zeros(2)
    ...     load(folder, [full_piece("w", "parameter", into)]), into
    ({'seed': 1, 'step': 7}, tensor([1., 1.]))
    """
    folder, together = Path(folder), together or Alone()
    work = Work(folder, step, [piece for piece in pieces if piece.owner], together)
    temporary = folder / f"{TEMPORARY}{step:08d}-{from_first(together, token or 0)}"
    work.do(lambda: begin(folder, temporary, token, warn), first_only=True)
    try:
        work.do(lambda: write_part(temporary, together.rank, work.pieces))
        saved = work.do(lambda: commit(temporary, work, extra or {}, token), first_only=True)
    except CheckpointError:
        if together.rank == 0:
            disk.remove_tree(temporary)
        raise
    if saved is not None and keep:
        retain(folder, keep, saved, warn)
    return folder / Saved(step, from_first(together, saved.attempt if saved else 0)).name


class Work:
    """Runs the phases of a save on all ranks; a failure on one rank is raised on all."""

    def __init__(self, folder: Path, step: int, pieces: Sequence[Piece], together: Together) -> None:
        self.folder, self.step, self.pieces, self.together = folder, step, pieces, together

    def do(self, work: Callable[[], T], first_only: bool = False) -> T | None:
        failure: CheckpointError | None = None
        result = None
        if not first_only or self.together.rank == 0:
            try:
                result = work()
            except CheckpointError as error:
                failure = error
            except OSError as error:
                failure = self.explained(error)
                failure.__cause__ = error
        failed = first_failed(self.together, f"{type(failure).__name__}: {failure}" if failure is not None else "")
        if failure is not None:
            raise failure
        if failed:
            rank, (kind, _, why) = failed[0], failed[1].partition(": ")
            failure = _KINDS.get(kind, CheckpointError)(f"rank {rank}: {why}")
            failure.second_hand = True
            raise failure
        return result

    def explained(self, error: OSError) -> CheckpointError:
        """Return the error that says why nothing was saved."""
        need = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.pieces)
        return CheckpointError(f"checkpoint of step {self.step} not saved: {disk.explain(error, self.folder, need)}")


def begin(folder: Path, temporary: Path, token: int | None, warn: Warn) -> None:
    """Create the temporary folder that all ranks write into; called on rank 0."""
    if token is None:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        claim_again(folder, token, warn)
    check_token(folder, token)
    sweep(folder)
    temporary.mkdir()


def _stem(rank: int) -> str:
    return f"rank-{rank:05d}"


def mark_of(rank: int) -> str:
    """Return the name of the marker file that a rank writes once its file is durable."""
    return f"{_stem(rank)}.json"


def write_part(temporary: Path, rank: int, pieces: Sequence[Piece], check: Callable[[], None] = lambda: None) -> None:
    """Write a rank's file, then its marker. `check` is called before each shard, and may raise."""
    part = _Part(*write_pieces(temporary / f"{_stem(rank)}.safetensors", pieces, check)) if pieces else _Part(None, [])
    unfinished = temporary / f".{mark_of(rank)}"
    unfinished.write_bytes(_PART.dump_json(part))
    os.rename(unfinished, temporary / mark_of(rank))


def commit(temporary: Path, work: Work, extra: dict[str, Any], token: int | None) -> Saved:
    """Commit the checkpoint under its final name; called on rank 0, once all ranks have written their markers."""
    folder, step, together = work.folder, work.step, work.together
    files, tensors = _join(_read_parts(temporary, together.num_ranks))
    manifest = Manifest(
        step=step,
        token=token or 0,
        generation=together.generation,
        num_ranks=together.num_ranks,
        fingerprint=fingerprint(tensors),
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


def _read_parts(temporary: Path, num_ranks: int) -> list[_Part]:
    parts = []
    for rank in range(num_ranks):
        path = temporary / mark_of(rank)
        try:
            parts.append(_PART.validate_json(path.read_bytes()))
        except (FileNotFoundError, ValidationError) as error:
            raise CheckpointError(
                f"rank {rank}'s part of the checkpoint is not in {temporary.parent}; several hosts need a folder that all of them share"
            ) from error
        path.unlink()
    return parts


def _join(parts: Sequence[_Part]) -> tuple[list[StoredFile], list[StoredTensor]]:
    """Merge the parts of all ranks: their files, and one entry for each global tensor with its shards."""
    files: list[StoredFile] = []
    by_key: dict[tuple[str, str, str], StoredTensor] = {}
    for part in parts:
        for tensor in part.tensors:
            first = by_key.setdefault(tensor.key, tensor.model_copy(update={"pieces": []}))
            if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"{label(tensor.key)} is {first.dtype}{first.shape} on one rank and {tensor.dtype}{tensor.shape} on another"
                )
            first.pieces.extend(piece.model_copy(update={"file": len(files)}) for piece in tensor.pieces)
        if part.file is not None:
            files.append(part.file)
    return files, sorted(by_key.values(), key=lambda tensor: tensor.key)
