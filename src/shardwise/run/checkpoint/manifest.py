"""Manifest of a checkpoint: its tensors, their shards and the digest of every file, as JSON with a digest of its own.

In: shards of all ranks. Out: text, and back; when parsed, every name, size, range and shape is checked, since a manifest may be damaged or
hostile. Not supported: signatures; a digest detects damage, not forgery.
"""

from __future__ import annotations

import hashlib
import json
import re
from math import prod
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardwise.errors import CheckpointError
from shardwise.run.checkpoint.region import BlockRegion, coverage_fault
from shardwise.run.checkpoint.state_shard import DTYPES, StateKind, key_label

FORMAT = "shardwise-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
Count = Annotated[int, Field(ge=0, le=2**62)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StoredFile(_Strict):
    """`name` inside the checkpoint's folder."""

    name: str
    size_bytes: Count
    sha256: str


class StoredShard(_Strict):
    """Bytes `begin <= i < begin + size` of file number `file` hold the region at `offsets`."""

    file: Count
    begin: Count
    offsets: list[Count]
    shape: list[Count]
    flat: tuple[Count, Count] | None = None

    def region(self, global_shape: tuple[int, ...]) -> BlockRegion:
        return BlockRegion(global_shape, tuple(self.offsets), tuple(self.shape), self.flat)


class StoredTensor(_Strict):
    """One global tensor and the shards that it consists of."""

    name: str
    kind: StateKind
    slot: str = ""
    dtype: str
    shape: list[Count]
    pieces: list[StoredShard]

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.kind, self.slot, self.name)

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


class Manifest(_Strict):
    """Manifest of one checkpoint. `token`: fencing token of the writer; `generation`: of the ranks that wrote it."""

    format: str = FORMAT
    version: Count = FORMAT_VERSION
    step: Count
    token: Count = 0
    generation: Count = 0
    num_ranks: Count = 1
    fingerprint: str
    files: list[StoredFile]
    tensors: list[StoredTensor]
    extra: dict[str, Any] = {}

    def dump(self) -> bytes:
        """Return the JSON text with a digest over its canonical form.

        Raises:
            CheckpointError: `extra` holds something that JSON cannot.
        """
        try:
            body = _canonical_json(self.model_dump(mode="json", exclude_defaults=False))
            return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the checkpoint's extra values must be JSON (numbers, text, lists, dicts): {error}") from error

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Parse and check a manifest.

        Raises:
            CheckpointError: damaged, of a newer format, or naming a file, range or shape that cannot be; names `where`.
        """
        try:
            outer = json.loads(data)
            body, digest = outer["manifest"], outer["sha256"]
            actual = hashlib.sha256(_canonical_json(body)).hexdigest()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: not a manifest ({type(error).__name__})") from error
        if actual != digest:
            raise CheckpointError(f"{where} is damaged: its SHA-256 is {actual[:12]}..., it says {str(digest)[:12]}...")
        version = body.get("version") if isinstance(body, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(f"{where} has format version {version}; this shardwise reads up to {FORMAT_VERSION}, so update shardwise")
        try:
            manifest = cls.model_validate_json(_canonical_json(body))
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(f"{where} is no manifest: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        manifest._check(where)
        return manifest

    def _check(self, where: str) -> None:
        if self.format != FORMAT:
            raise CheckpointError(f"{where} is a {self.format!r}; this is read: {FORMAT!r}")
        for file in self.files:
            check_file_name(file.name, where)
        for tensor in self.tensors:
            self._check_tensor(tensor, where)
        _refuse_duplicates([file.name for file in self.files], f"{where}: file")
        _refuse_duplicates([key_label(tensor.key) for tensor in self.tensors], f"{where}: tensor")
        if self.fingerprint != model_fingerprint(self.tensors):
            raise CheckpointError(f"{where} is damaged: its fingerprint is not that of the tensors that it names")

    def _check_tensor(self, tensor: StoredTensor, where: str) -> None:
        what = f"{where}: {key_label(tensor.key)}"
        if tensor.dtype not in DTYPES:
            raise CheckpointError(f"{what} has dtype {tensor.dtype!r}; known: {', '.join(DTYPES)}")
        shape = tuple(tensor.shape)
        try:
            regions = [piece.region(shape) for piece in tensor.pieces]
        except CheckpointError as error:
            raise CheckpointError(f"{what}: {error}") from error
        for piece, region in zip(tensor.pieces, regions, strict=True):
            end = piece.begin + region.size * tensor.item_bytes
            if piece.file >= len(self.files) or end > self.files[piece.file].size_bytes:
                raise CheckpointError(f"{what} lies in bytes {piece.begin} to {end} of file number {piece.file}, which has no such bytes")
        if fault := coverage_fault(shape, regions):
            raise CheckpointError(f"{what} of {list(shape)} is not complete: {fault}")


def _canonical_json(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def _refuse_duplicates(names: list[str], what: str) -> None:
    names_so_far: set[str] = set()
    for name in names:
        if name in names_so_far:
            raise CheckpointError(f"{what} {name} is there twice")
        names_so_far.add(name)


def check_file_name(name: str, where: str) -> None:
    """Raise if a file name is not a plain name in the same folder.

    Raises:
        CheckpointError: absolute, with a separator, `..`, or hidden.
    """
    if PurePosixPath(name).name != name or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise CheckpointError(f"{where} names the file {name!r}; a checkpoint's files lie in its own folder, under plain names")


def model_fingerprint(tensors: list[StoredTensor]) -> str:
    """SHA-256 over names, shapes and dtypes of parameters and buffers: equal for the same model under any layout."""
    lines = sorted(f"{t.name} {t.kind} {t.dtype} {t.shape}" for t in tensors if t.kind in ("parameter", "buffer"))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
