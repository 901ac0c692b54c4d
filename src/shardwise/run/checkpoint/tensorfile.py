"""Read and write a rank's file in the safetensors format: written with its digest in one pass, read by byte range.

In: shards. Out: a file that `safetensors.safe_open` reads too, and the byte offset of each shard. Not supported: compression.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import CheckpointError
from shardwise.run.checkpoint import disk
from shardwise.run.checkpoint.manifest import StoredFile, StoredShard, StoredTensor
from shardwise.run.checkpoint.region import TensorBox
from shardwise.run.checkpoint.state_shard import DTYPE_NAMES, DTYPES, StateShard, key_label


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements in row-major order, little-endian; copies only if not contiguous or not on the host."""
    host = tensor.detach().to("cpu").contiguous()
    # A one-element tensor counts as contiguous whatever its strides are, but then cannot be viewed as bytes.
    host = host.as_strided((host.numel(),), (1,))
    array: Any = host.view(torch.uint8).numpy() if host.numel() else b""
    return memoryview(array)


def encode_header(entries: Sequence[tuple[str, Tensor]], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """Return a safetensors header and the offset of each tensor in the file."""
    table: dict[str, object] = {"__metadata__": metadata}
    begins, at = [], 0
    for name, tensor in entries:
        size = tensor.numel() * tensor.element_size()
        table[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        begins.append(at)
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + begin for begin in begins]


def write_tensors(
    path: Path, entries: Sequence[tuple[str, Tensor]], metadata: dict[str, str], check: Callable[[], None] = lambda: None
) -> tuple[int, str, list[int]]:
    """Write named tensors as a new safetensors file and fsync it. Returns its size, its SHA-256 and the offset of each tensor.

    Pass wide dtypes first: tensors are written in this order without gaps, and are then all aligned. `check` is called before each, and may
    raise.
    """
    header, begins = encode_header(entries, metadata)
    size, digest = disk.write_file(path, _file_chunks(header, (tensor for _, tensor in entries), check))
    return size, digest, begins


def _file_chunks(header: bytes, tensors: Iterable[Tensor], check: Callable[[], None]) -> Iterator[disk.Buffer]:
    yield header
    for tensor in tensors:
        check()
        yield bytes_of(tensor)


def write_shards(
    path: Path, shards: Sequence[StateShard], check: Callable[[], None] = lambda: None
) -> tuple[StoredFile, list[StoredTensor]]:
    """Write one rank's shards; `file` of every stored shard is 0, and is renumbered when the ranks' parts are merged."""
    shards = sorted(shards, key=lambda piece: -piece.tensor.element_size())
    names: dict[str, int] = {}
    entries = []
    for piece in shards:
        name = key_label(piece.key)
        names[name] = number = names.get(name, -1) + 1
        entries.append((f"{name}#{number}" if number else name, piece.tensor))
    size, digest, begins = write_tensors(path, entries, {"format": "pt"}, check)
    tensors: dict[tuple[str, str, str], StoredTensor] = {}
    for piece, begin in zip(shards, begins, strict=True):
        region = piece.region
        stored = StoredShard(file=0, begin=begin, offsets=list(region.offsets), shape=list(region.shape), flat=region.flat)
        tensor = tensors.setdefault(
            piece.key,
            StoredTensor(
                name=piece.name,
                kind=piece.kind,
                slot=piece.slot,
                dtype=DTYPE_NAMES[piece.tensor.dtype],
                shape=list(piece.global_shape),
                pieces=[],
            ),
        )
        tensor.pieces.append(stored)
    return StoredFile(name=path.name, size_bytes=size, sha256=digest), list(tensors.values())


class TensorFileReader:
    """Reads boxes of stored tensors from a checkpoint's folder; only the rows that are needed. Use it in a `with` statement."""

    def __init__(self, folder: Path, files: Sequence[StoredFile]) -> None:
        self.folder, self.files = folder, files
        self._handles: dict[int, int] = {}
        self.read_bytes = 0

    def __enter__(self) -> TensorFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def copy_shard(self, out: Tensor, wanted: StateShard, stored: StoredTensor) -> int:
        """Copy stored elements into `out` (flat, of the wanted shard's size and the stored dtype). Returns the number copied."""
        shape, copied = tuple(stored.shape), 0
        boxes = [(box, out[begin : begin + box.size].view(box.shape)) for box, begin in wanted.region.boxes()]
        for piece in stored.pieces:
            for source, begin in piece.region(shape).boxes():
                for target, view in boxes:
                    common = source.intersect(target)
                    if common is None:
                        continue
                    data, first = self._rows(piece, stored, source, begin, common)
                    view[target.index_of(common)] = data[first.index_of(common)]
                    copied += common.size
        return copied

    def _rows(self, piece: StoredShard, stored: StoredTensor, source: TensorBox, begin: int, common: TensorBox) -> tuple[Tensor, TensorBox]:
        """Read the rows of `source` (which begins at element `begin` of the shard) that `common` needs; also returns their box."""
        rows = source
        if source.shape:
            row = source.size // source.shape[0]
            begin += (common.offsets[0] - source.offsets[0]) * row
            rows = TensorBox((common.offsets[0], *source.offsets[1:]), (common.shape[0], *source.shape[1:]))
        data = self._read(piece.file, piece.begin + begin * stored.item_bytes, rows.size * stored.item_bytes)
        return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(rows.shape), rows

    def _read(self, file: int, begin: int, size: int) -> bytearray:
        path = self.folder / self.files[file].name
        if file not in self._handles:
            self._handles[file] = disk.open_regular(path)
        data = bytearray(size)
        view, position = memoryview(data), 0
        while position < size:
            num_read = os.preadv(self._handles[file], [view[position:]], begin + position)
            if not num_read:
                raise CheckpointError(f"{path} is damaged: it ends at byte {begin + position}, byte {begin + size} is needed")
            position += num_read
        self.read_bytes += size
        return data
