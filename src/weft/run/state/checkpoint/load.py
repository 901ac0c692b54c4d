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

from weft import units
from weft.errors import CheckpointError
from weft.run.state.checkpoint import disk
from weft.run.state.checkpoint.folder import Saved, Warn, committed, read_manifest
from weft.run.state.checkpoint.manifest import MANIFEST, Manifest, StoredTensor
from weft.run.state.checkpoint.piece import DTYPES, KINDS, OPTIONAL, Piece, full_piece, label
from weft.run.state.checkpoint.save import warn_python
from weft.run.state.checkpoint.tensorfile import Reader
from weft.run.state.checkpoint.together import Alone, Together, first_failed, from_first

_SHOWN = 3


def verify(path: Path | str, together: Together | None = None) -> Manifest:
    """Check the manifest and every file's size and SHA-256; several ranks divide the files.

    Raises:
        CheckpointError: names the first damaged, missing or surplus file.
    """
    path, together = Path(path), together or Alone()
    manifest, failure = None, None
    try:
        manifest = read_manifest(path)
        _check_files(path, manifest, together.rank, together.num_ranks)
    except CheckpointError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"{path} cannot be read: {error.strerror}")
    failed = first_failed(together, str(failure or ""))
    if failure is not None:
        raise failure
    if failed or manifest is None:
        raise _second_hand(failed or (0, f"{path} is damaged"))
    return manifest


def _second_hand(failed: tuple[int, str]) -> CheckpointError:
    error = CheckpointError(f"rank {failed[0]}: {failed[1]}")
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


def latest_good(folder: Path | str, together: Together | None = None, warn: Warn = warn_python) -> Path | None:
    """Return the newest intact checkpoint of a folder, None if there is none; warns of each damaged one that it skips."""
    checkpoint = _latest_good(Path(folder), together or Alone(), warn)
    return checkpoint[0] if checkpoint else None


def _latest_good(folder: Path, together: Together, warn: Warn) -> tuple[Path, Manifest] | None:
    # Rank 0's list decides: on a shared file system other ranks may see a name later.
    names = committed(folder) if together.rank == 0 else []
    for number in reversed(range(from_first(together, len(names)))):
        saved = names[number] if names else Saved(0, 0)
        path = folder / Saved(from_first(together, saved.step), from_first(together, saved.attempt)).name
        try:
            return path, verify(path, together)
        except CheckpointError as error:
            if together.rank == 0:
                warn(f"{error}; falling back to the checkpoint before it")
    return None


def load(folder: Path | str, wanted: Sequence[Piece], together: Together | None = None, warn: Warn = warn_python) -> dict[str, Any]:
    """Fill the tensors of `wanted` in place; every rank calls it. Returns the `extra` that was saved, with `step`.

    `folder`: one checkpoint, or a folder of them, of which the newest intact one is loaded. Without optimizer shards the stored
    optimizer is ignored. Floating-point dtypes are converted, with a warning.

    Raises:
        CheckpointError: nothing to load; damaged; or of another model, naming the first tensors that differ. Then no tensor
            has been touched.
    """
    together = together or Alone()
    path, manifest = opened(folder, together, warn)
    fill(path, manifest, wanted, together, warn)
    return {**manifest.extra, "step": manifest.step}


def opened(folder: Path | str, together: Together | None = None, warn: Warn = warn_python) -> tuple[Path, Manifest]:
    """Open and verify one checkpoint, or the newest intact one of a folder; returns path and manifest. Every rank calls it.

    Raises:
        CheckpointError: nothing there, or damaged.
    """
    folder, together = Path(folder), together or Alone()
    if (folder / MANIFEST).exists():
        return folder, verify(folder, together)
    checkpoint = _latest_good(folder, together, warn)
    if checkpoint is None:
        raise CheckpointError(f"{folder} holds no checkpoint that is whole; begin a new run, or name another folder")
    return checkpoint


def fill(path: Path, manifest: Manifest, wanted: Sequence[Piece], together: Together | None = None, warn: Warn = warn_python) -> None:
    """Fill the tensors of `wanted` in place from what `open_checkpoint` returned; every rank calls it.

    Raises:
        CheckpointError: of another model; then no tensor has been touched.
    """
    together = together or Alone()
    match(path, manifest, wanted, together, warn)
    stored = {tensor.key: tensor for tensor in manifest.tensors}
    failure: Exception | None = None
    try:
        with torch.no_grad(), Reader(path, manifest.files) as reader:
            for piece in wanted:
                if piece.key in stored:
                    _fill(reader, piece, stored[piece.key])
    except (CheckpointError, OSError) as error:
        failure = error
    failed = first_failed(together, f"{path} cannot be read: {failure}" if failure is not None else "")
    if failure is not None:
        raise CheckpointError(f"{path} cannot be read: {failure}") from failure
    if failed:
        raise _second_hand(failed)


def _fill(reader: Reader, piece: Piece, stored: StoredTensor) -> None:
    out = torch.empty(piece.region.size, dtype=DTYPES[stored.dtype])
    copied = reader.fill(out, piece, stored)
    if copied != out.numel():
        raise CheckpointError(f"{piece.label}: {copied} of {out.numel()} elements are stored")
    piece.tensor.copy_(out.view(piece.tensor.shape))


def match(path: Path, manifest: Manifest, wanted: Sequence[Piece], together: Together, warn: Warn = warn_python) -> None:
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
    requested = [int(kind in {piece.kind for piece in wanted}) for kind in KINDS]
    combined = iter(together.maximum([*used, *differs, *requested, len(missing), converted]))
    used, differs, requested = list(islice(combined, len(used))), list(islice(combined, len(used))), list(islice(combined, len(KINDS)))
    num_absent, converted = combined
    kinds = {"parameter", "buffer"} | {kind for kind, is_used in zip(KINDS, requested, strict=True) if is_used}
    surplus = [
        label(stored.key)
        for stored, is_used in zip(manifest.tensors, used, strict=True)
        if not is_used and stored.kind in kinds.difference(OPTIONAL)
    ]
    reasons = []
    if num_absent:
        reasons.append(f"{num_absent} tensors of this model are not in it ({_first(sorted(set(missing)))})")
    if surplus:
        reasons.append(f"{len(surplus)} of its {len(manifest.tensors)} tensors are not in this model ({_first(surplus)})")
    if any(differs):
        reasons.append(f"{sum(differs)} differ ({first_differs or 'on another rank'})")
    if reasons:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {'; '.join(reasons)}; use the configuration it was trained with, or a new run folder"
        )
    if converted and together.rank == 0:
        warn(f"{path}: tensors are converted from the floating-point type that they were stored in")


def _first(names: list[str]) -> str:
    """Format the first few names; a rank without any refers to another rank."""
    return ", ".join(names[:_SHOWN] or ["on another rank"]) + (", ..." if len(names) > _SHOWN else "")


def inspect(path: Path | str) -> dict[str, Any]:
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
    with Reader(path, manifest.files) as reader:
        for stored in manifest.tensors:
            if stored.kind in kinds:
                piece = full_piece(stored.name, stored.kind, torch.empty(stored.shape, dtype=DTYPES[stored.dtype]), stored.slot)
                _fill(reader, piece, stored)
                yield piece.label, piece.tensor
