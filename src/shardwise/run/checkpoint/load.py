"""Load a checkpoint under any layout (resharding). In: a folder and the shards that a rank wants. Out: the filled shards, and `extra`.

Every file is checked against its digest before a byte of it is used; ranks divide that work. Not supported: partial loading into a model
with other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise import units
from shardwise.errors import CheckpointError
from shardwise.run.checkpoint import disk
from shardwise.run.checkpoint.agreement import RankAgreement, SingleRank, broadcast_from_first, first_failed
from shardwise.run.checkpoint.folder import SavedCheckpoint, Warn, committed_checkpoints, read_manifest
from shardwise.run.checkpoint.manifest import MANIFEST, Manifest, StoredTensor
from shardwise.run.checkpoint.save import warn_in_python
from shardwise.run.checkpoint.state_shard import DTYPES, OPTIONAL, STATE_KINDS, StateShard, full_shard, key_label
from shardwise.run.checkpoint.tensorfile import TensorFileReader

_NUM_SHOWN = 3


def verify(path: Path | str, ranks: RankAgreement | None = None) -> Manifest:
    """Check the manifest and every file's size and SHA-256; several ranks divide the files.

    Raises:
        CheckpointError: names the first damaged, missing or surplus file.
    """
    path, ranks = Path(path), ranks or SingleRank()
    manifest, failure = None, None
    try:
        manifest = read_manifest(path)
        _check_files(path, manifest, ranks.rank, ranks.num_ranks)
    except CheckpointError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"{path} cannot be read: {error.strerror}")
    failed = first_failed(ranks, str(failure or ""))
    if failure is not None:
        raise failure
    if failed or manifest is None:
        raise _reported_error(failed or (0, f"{path} is damaged"))
    return manifest


def _reported_error(rank_and_reason: tuple[int, str]) -> CheckpointError:
    error = CheckpointError(f"rank {rank_and_reason[0]}: {rank_and_reason[1]}")
    error.second_hand = True
    return error


def _check_files(path: Path, manifest: Manifest, rank: int, num_ranks: int) -> None:
    listed = {MANIFEST, *(file.name for file in manifest.files)}
    for entry in sorted(path.iterdir()):
        if entry.suffix == ".safetensors" and entry.name not in listed:
            raise CheckpointError(f"{path} holds {entry.name}, which its manifest does not name; remove it or use another checkpoint")
    for number, file in enumerate(manifest.files):
        file_path = path / file.name
        if not file_path.exists():
            raise CheckpointError(f"{file_path} is missing")
        if (size := file_path.lstat().st_size) != file.size_bytes:
            raise CheckpointError(f"{file_path} is damaged: {size} bytes, {file.size_bytes} were written")
        if number % num_ranks == rank and (digest := disk.sha256_of(file_path)) != file.sha256:
            raise CheckpointError(f"{file_path} is damaged: its SHA-256 is {digest[:12]}..., {file.sha256[:12]}... was written")


def latest_good(folder: Path | str, ranks: RankAgreement | None = None, warn: Warn = warn_in_python) -> Path | None:
    """Return the newest intact checkpoint of a folder, None if there is none; warns of each damaged one that it skips."""
    checkpoint = _latest_good(Path(folder), ranks or SingleRank(), warn)
    return checkpoint[0] if checkpoint else None


def _latest_good(folder: Path, ranks: RankAgreement, warn: Warn) -> tuple[Path, Manifest] | None:
    # Rank 0's list decides: on a shared file system other ranks may see a name later.
    names = committed_checkpoints(folder) if ranks.rank == 0 else []
    for number in reversed(range(broadcast_from_first(ranks, len(names)))):
        saved = names[number] if names else SavedCheckpoint(0, 0)
        path = folder / SavedCheckpoint(broadcast_from_first(ranks, saved.step), broadcast_from_first(ranks, saved.attempt)).name
        try:
            return path, verify(path, ranks)
        except CheckpointError as error:
            if ranks.rank == 0:
                warn(f"{error}; falling back to the checkpoint before it")
    return None


def load(
    folder: Path | str, wanted: Sequence[StateShard], ranks: RankAgreement | None = None, warn: Warn = warn_in_python
) -> dict[str, Any]:
    """Fill the tensors of `wanted` in place; every rank calls it. Returns the `extra` that was saved, with `step`.

    `folder`: one checkpoint, or a folder of them, of which the newest intact one is loaded. Without optimizer shards the stored
    optimizer is ignored. Floating-point dtypes are converted, with a warning.

    Raises:
        CheckpointError: nothing to load; damaged; or of another model, naming the first tensors that differ. Then no tensor
            has been touched.
    """
    ranks = ranks or SingleRank()
    path, manifest = open_checkpoint(folder, ranks, warn)
    fill_shards(path, manifest, wanted, ranks, warn)
    return {**manifest.extra, "step": manifest.step}


def open_checkpoint(folder: Path | str, ranks: RankAgreement | None = None, warn: Warn = warn_in_python) -> tuple[Path, Manifest]:
    """Open and verify one checkpoint, or the newest intact one of a folder; returns path and manifest. Every rank calls it.

    Raises:
        CheckpointError: nothing there, or damaged.
    """
    folder, ranks = Path(folder), ranks or SingleRank()
    if (folder / MANIFEST).exists():
        return folder, verify(folder, ranks)
    checkpoint = _latest_good(folder, ranks, warn)
    if checkpoint is None:
        raise CheckpointError(f"{folder} holds no checkpoint that is whole; begin a new run, or name another folder")
    return checkpoint


def fill_shards(
    path: Path, manifest: Manifest, wanted: Sequence[StateShard], ranks: RankAgreement | None = None, warn: Warn = warn_in_python
) -> None:
    """Fill the tensors of `wanted` in place from what `open_checkpoint` returned; every rank calls it.

    Raises:
        CheckpointError: of another model; then no tensor has been touched.
    """
    ranks = ranks or SingleRank()
    check_same_model(path, manifest, wanted, ranks, warn)
    stored = {tensor.key: tensor for tensor in manifest.tensors}
    failure: Exception | None = None
    try:
        with torch.no_grad(), TensorFileReader(path, manifest.files) as reader:
            for piece in wanted:
                if piece.key in stored:
                    _fill_shard(reader, piece, stored[piece.key])
    except (CheckpointError, OSError) as error:
        failure = error
    failed = first_failed(ranks, f"{path} cannot be read: {failure}" if failure is not None else "")
    if failure is not None:
        raise CheckpointError(f"{path} cannot be read: {failure}") from failure
    if failed:
        raise _reported_error(failed)


def _fill_shard(reader: TensorFileReader, shard: StateShard, stored: StoredTensor) -> None:
    out = torch.empty(shard.region.size, dtype=DTYPES[stored.dtype])
    copied = reader.copy_shard(out, shard, stored)
    if copied != out.numel():
        raise CheckpointError(f"{shard.label}: {copied} of {out.numel()} elements are stored")
    shard.tensor.copy_(out.view(shard.tensor.shape))


def check_same_model(
    path: Path, manifest: Manifest, wanted: Sequence[StateShard], ranks: RankAgreement, warn: Warn = warn_in_python
) -> None:
    """Raise CheckpointError on every rank if a name or a shape differs on any."""
    number = {tensor.key: i for i, tensor in enumerate(manifest.tensors)}
    used, differs = [0] * len(number), [0] * len(number)
    missing, first_differs, converted = [], "", 0
    for piece in wanted:
        tensor_index = number.get(piece.key)
        if tensor_index is None:
            missing += [piece.label] * (piece.kind not in OPTIONAL)
            continue
        used[tensor_index], stored = 1, manifest.tensors[tensor_index]
        dtype, shape = DTYPES[stored.dtype], tuple(stored.shape)
        converts = dtype != piece.tensor.dtype
        converted |= converts
        if shape != tuple(piece.global_shape) or (converts and not (dtype.is_floating_point and piece.tensor.is_floating_point())):
            differs[tensor_index] = 1
            first_differs = first_differs or (
                f"{piece.label} is {dtype} {stored.shape} there and {piece.tensor.dtype} {list(piece.global_shape)} here"
            )
    # A kind that no rank requests is ignored; one that any rank requests must be requested completely.
    requested = [int(kind in {piece.kind for piece in wanted}) for kind in STATE_KINDS]
    combined = iter(ranks.all_reduce_max([*used, *differs, *requested, len(missing), converted]))
    used, differs, requested = (
        list(islice(combined, len(used))),
        list(islice(combined, len(used))),
        list(islice(combined, len(STATE_KINDS))),
    )
    num_absent, converted = combined
    kinds = {"parameter", "buffer"} | {kind for kind, is_used in zip(STATE_KINDS, requested, strict=True) if is_used}
    surplus = [
        key_label(stored.key)
        for stored, is_used in zip(manifest.tensors, used, strict=True)
        if not is_used and stored.kind in kinds.difference(OPTIONAL)
    ]
    reasons = []
    if num_absent:
        reasons.append(f"{num_absent} tensors of this model are not in it ({_first_names(sorted(set(missing)))})")
    if surplus:
        reasons.append(f"{len(surplus)} of its {len(manifest.tensors)} tensors are not in this model ({_first_names(surplus)})")
    if any(differs):
        reasons.append(f"{sum(differs)} differ ({first_differs or 'on another rank'})")
    if reasons:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {'; '.join(reasons)}; use the configuration it was trained with, or a new run folder"
        )
    if converted and ranks.rank == 0:
        warn(f"{path}: tensors are converted from the floating-point type that they were stored in")


def _first_names(names: list[str]) -> str:
    """Format the first few names; a rank without any refers to another rank."""
    return ", ".join(names[:_NUM_SHOWN] or ["on another rank"]) + (", ..." if len(names) > _NUM_SHOWN else "")


def inspect_checkpoint(path: Path | str) -> dict[str, Any]:
    """Summarise a checkpoint from its manifest alone: step, sizes, counts, `extra`. JSON-ready.

    Raises:
        CheckpointError: no manifest, or a damaged one.
    """
    manifest = read_manifest(Path(path))
    kinds: dict[str, dict[str, int]] = {}
    for tensor in manifest.tensors:
        entry = kinds.setdefault(tensor.kind, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += tensor.size_bytes
    size = sum(file.size_bytes for file in manifest.files)
    return {
        "step": manifest.step,
        "token": manifest.token,
        "num_ranks": manifest.num_ranks,
        "fingerprint": manifest.fingerprint,
        "files": len(manifest.files),
        "size_bytes": size,
        "size": units.format_bytes(size),
        "kinds": kinds,
        "extra": manifest.extra,
    }


def read_full(path: Path | str, kinds: Sequence[str] = ("parameter", "buffer")) -> Iterator[tuple[str, Tensor]]:
    """Yield the full tensors of one checkpoint, after verifying it: (name, tensor); optimizer state as `name:slot`.

    Raises:
        CheckpointError: damaged.
    """
    path = Path(path)
    manifest = verify(path)
    with TensorFileReader(path, manifest.files) as reader:
        for stored in manifest.tensors:
            if stored.kind in kinds:
                piece = full_shard(stored.name, stored.kind, torch.empty(stored.shape, dtype=DTYPES[stored.dtype]), stored.slot)
                _fill_shard(reader, piece, stored)
                yield piece.label, piece.tensor
