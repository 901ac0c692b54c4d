"""A rank's file: the safetensors format, written with its digest in one pass and read by byte range.

In: pieces. Out: a file that `safetensors.safe_open` reads too, and where each piece lies in it. Not modelled: compression.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.run.state.checkpoint import disk
from weft.run.state.checkpoint.manifest import StoredFile, StoredPiece, StoredTensor
from weft.run.state.checkpoint.piece import DTYPE_NAMES, DTYPES, Piece, label
from weft.run.state.checkpoint.region import Box


def bytes_of(tensor: Tensor) -> memoryview:
    """The elements in row-major order, little-endian; copies only what is not contiguous or not on the host."""
    host = tensor.detach().to("cpu").contiguous()
    # A tensor of one element counts as contiguous whatever its strides are, and then cannot be viewed as bytes.
    host = host.as_strided((host.numel(),), (1,))
    array: Any = host.view(torch.uint8).numpy() if host.numel() else b""
    return memoryview(array)


def header_of(entries: Sequence[tuple[str, Tensor]], metadata: dict[str, str]) -> tuple[bytes, list[int]]:
    """A safetensors header and where each tensor begins in the file."""
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
    """Write named tensors as a new safetensors file and fsync it. Returns its size, its SHA-256 and where each begins.

    Give those of wide dtypes first: they are written in this order without gaps, and then every tensor is aligned. `check` is called before
    each, and may raise.
    """
    header, begins = header_of(entries, metadata)
    size, digest = disk.write_file(path, _chain(header, (tensor for _, tensor in entries), check))
    return size, digest, begins


def _chain(header: bytes, tensors: Iterable[Tensor], check: Callable[[], None]) -> Iterator[disk.Buffer]:
    yield header
    for tensor in tensors:
        check()
        yield bytes_of(tensor)


def write_pieces(path: Path, pieces: Sequence[Piece], check: Callable[[], None] = lambda: None) -> tuple[StoredFile, list[StoredTensor]]:
    """One rank's pieces; `file` of every stored piece is 0, to be renumbered by whoever joins the ranks."""
    pieces = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
    names: dict[str, int] = {}
    entries = []
    for piece in pieces:
        name = label(piece.key)
        names[name] = number = names.get(name, -1) + 1
        entries.append((f"{name}#{number}" if number else name, piece.tensor))
    size, digest, begins = write_tensors(path, entries, {"format": "pt"}, check)
    tensors: dict[tuple[str, str, str], StoredTensor] = {}
    for piece, begin in zip(pieces, begins, strict=True):
        region = piece.region
        stored = StoredPiece(file=0, begin=begin, offsets=list(region.offsets), shape=list(region.shape), flat=region.flat)
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


class Reader:
    """Reads boxes of stored tensors from a checkpoint's folder; only the rows that are wanted. Close it, or use `with`."""

    def __init__(self, folder: Path, files: Sequence[StoredFile]) -> None:
        self.folder, self.files = folder, files
        self._open: dict[int, int] = {}
        self.read_bytes = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            os.close(handle)
        self._open.clear()

    def fill(self, out: Tensor, wanted: Piece, stored: StoredTensor) -> int:
        """Copy into `out` (flat, of the wanted piece's size and the stored dtype) what is stored. Returns elements copied."""
        shape, copied = tuple(stored.shape), 0
        boxes = [(box, out[begin : begin + box.size].view(box.shape)) for box, begin in wanted.region.boxes()]
        for piece in stored.pieces:
            for source, begin in piece.region(shape).boxes():
                for target, view in boxes:
                    common = source.intersect(target)
                    if common is None:
                        continue
                    data, first = self._rows(piece, stored, source, begin, common)
                    view[target.slices_of(common)] = data[first.slices_of(common)]
                    copied += common.size
        return copied

    def _rows(self, piece: StoredPiece, stored: StoredTensor, source: Box, begin: int, common: Box) -> tuple[Tensor, Box]:
        """The rows of `source` (which begins at element `begin` of the piece) that `common` needs, and their box."""
        rows = source
        if source.shape:
            row = source.size // source.shape[0]
            begin += (common.offsets[0] - source.offsets[0]) * row
            rows = Box((common.offsets[0], *source.offsets[1:]), (common.shape[0], *source.shape[1:]))
        data = self._read(piece.file, piece.begin + begin * stored.item_bytes, rows.size * stored.item_bytes)
        return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(rows.shape), rows

    def _read(self, file: int, begin: int, size: int) -> bytearray:
        path = self.folder / self.files[file].name
        if file not in self._open:
            self._open[file] = disk.open_regular(path)
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            got = os.preadv(self._open[file], [view[at:]], begin + at)
            if not got:
                raise CheckpointError(f"{path} is damaged: it ends at byte {begin + at}, byte {begin + size} is needed")
            at += got
        self.read_bytes += size
        return data
