"""Live weight updates of a served model: training ranks send shards over TCP, and the model switches between two batches.

With a token only holders of it are listened to, on loopback too; without one, processes of the same user on this host.

A version is staged next to the weights in use until every rank has sent its shards, each element once, and all ranks have committed it
(two-phase commit). Missing or duplicate elements or another model's shards are refused, and the weights stay.
A replica that starts or restarts loads the newest version from a file of the server.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.errors import format_error
from shardwise.plan.ir.toml_text import parse_json
from shardwise.world import guard

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
WAIT_S = 120.0
LONGEST_LINE, LARGEST_READ, MAX_COUNT = 1 << 16, 1 << 20, 1 << 20  # bytes of a header; bytes read at once; ranks or pieces of a version


@dataclass
class _StagedVersion:
    """A version in transfer: tensors, masks of received elements, and how many ranks have sent all and committed."""

    num_ranks: int = 1
    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_received: dict[str, Tensor] = field(default_factory=dict)
    num_sent: int = 0
    num_committed: int = 0
    error: str = ""


class WeightReceiver:
    """Listens at a free port of `host`, by default loopback, for clients with the `token` (`shardwise.world.guard`); without a token on
    loopback, for processes of this user. `lock`: held while the model computes a batch, and while it switches weights. `newest_file`: the
    newest version, written and read by all replicas of the model."""

    def __init__(self, module: nn.Module, host: str = "", token: str = "", newest_file: Path | None = None) -> None:
        self.module, self.version, self.received_bytes = module, 0, 0
        self.lock = threading.Lock()
        self._newest_file = newest_file
        if newest_file is not None and newest_file.exists():
            with safe_open(newest_file, "pt") as file:
                self._load_weights(int(file.metadata()["version"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        self._staged: dict[int, _StagedVersion] = {}
        self._condition = threading.Condition()
        self._listener = socket.create_server((host if host and token else "127.0.0.1", 0), backlog=guard.BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        # This replica's staged file, until all ranks have committed.
        self._staged_file = newest_file.with_name(f".{self.address[1]}-{newest_file.name}") if newest_file is not None else Path()
        guard.serve_streams(self._listener, guard.validate_token(token) if token else b"", self._serve)

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        with connection, connection.makefile("rb") as stream:
            try:
                head = _read_line(stream)
                version, num_ranks, num_pieces = (_count_of(head, key) for key in ("version", "ranks", "pieces"))
                with self._condition:
                    staged = self._staged.setdefault(version, _StagedVersion(num_ranks))
                if not num_ranks or num_ranks != staged.num_ranks:
                    raise ValueError(f"{num_ranks} ranks, and others send version {version} from {staged.num_ranks}")
                try:
                    self._receive(connection, stream, staged, version, num_pieces)
                finally:  # in use or discarded: ranks may send this version again
                    with self._condition:
                        if self._staged.get(version) is staged:
                            del self._staged[version]
            except (OSError, EOFError):
                return  # the rank failed: nothing is committed
            except (ValueError, TypeError, KeyError) as error:
                with suppress(OSError):
                    connection.sendall(json.dumps({"error": f"no message of a rank: {format_error(error)}"[:500]}).encode() + b"\n")

    def _receive(self, connection: socket.socket, stream: BinaryIO, staged: _StagedVersion, version: int, num_pieces: int) -> None:
        expected = _named_tensors(self.module)
        for _ in range(num_pieces):
            piece = _read_line(stream)
            if error := _find_wrong_header(piece, expected):
                with self._condition:
                    staged.error = staged.error or error
                _discard_bytes(stream, _count_of(piece, "bytes", None))
                continue
            data = stream.read(piece["bytes"])
            if len(data) < piece["bytes"]:
                raise EOFError
            with self._condition:
                self.received_bytes += len(data)
                staged.error = staged.error or _store_shard(staged, piece, data)
        with self._condition:
            staged.num_sent += 1
            if staged.num_sent == staged.num_ranks:
                staged.error = staged.error or _find_mismatch(self.module, staged) or self._write(version, staged.tensors)
            self._condition.notify_all()
            all_sent = self._condition.wait_for(lambda: staged.num_sent >= staged.num_ranks, WAIT_S)
            trouble = staged.error or ("" if all_sent else "not all ranks sent their part in time")
        connection.sendall(json.dumps({"error": trouble}).encode() + b"\n")
        committed = _read_line(stream)["commit"]
        with self._condition:
            if committed is not True or trouble:
                return
            staged.num_committed += 1
            if staged.num_committed == staged.num_ranks:
                self._switch_version(version, staged)
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: staged.num_committed >= staged.num_ranks, WAIT_S)
        connection.sendall(json.dumps({"error": "" if done else "not all ranks committed"}).encode() + b"\n")

    def _switch_version(self, version: int, staged: _StagedVersion) -> None:
        if self._newest_file is not None:
            os.replace(self._staged_file, self._newest_file)
        self._load_weights(version, staged.tensors)

    def _load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        with self.lock, torch.no_grad():
            for name, tensor in _named_tensors(self.module).items():
                tensor.copy_(tensors[name])
            self.version = version

    def _write(self, version: int, tensors: dict[str, Tensor]) -> str:
        """Write the staged version to a file; return why that failed, else an empty string."""
        try:
            if self._newest_file is not None:
                self._staged_file.parent.mkdir(parents=True, exist_ok=True)
                save_file(tensors, self._staged_file, {"version": str(version)})
        except (OSError, SafetensorError) as error:
            return f"{self._newest_file} cannot be written: {error}"
        return ""


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, tied ones once, under the trainer's names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _read_line(stream: BinaryIO) -> dict[str, Any]:
    """Read a line of JSON. Raises EOFError at the end, ValueError for anything else than an object of at most `LONGEST_LINE` bytes."""
    line = stream.readline(LONGEST_LINE)
    if not line:
        raise EOFError
    values = parse_json(line) if line.endswith(b"\n") else None
    if not isinstance(values, dict):
        raise ValueError("a line that is no object")
    return values


def _count_of(values: Mapping[str, Any], key: str, limit: int | None = MAX_COUNT) -> int:
    number = values.get(key)
    if type(number) is not int or not number >= 0 or (limit is not None and key != "version" and number > limit):
        raise ValueError(f"{key} is {str(number)[:40]!r}")
    return number


def _discard_bytes(stream: BinaryIO, size: int) -> None:
    while size:
        data = stream.read(min(size, LARGEST_READ))
        if not data:
            raise EOFError
        size -= len(data)


def _find_wrong_header(header: Mapping[str, Any], expected: Mapping[str, Tensor]) -> str:
    """Return what is wrong with the header of a shard; empty if its bytes may be read."""
    name, shape, dtype = header.get("name"), header.get("shape"), header.get("dtype")
    if not isinstance(name, str) or name not in expected:
        return f"the server's model and the trainer's differ in {str(name)[:200]}"
    dims = list(expected[name].shape)
    if shape != dims:
        return f"{name} is {str(shape)[:200]} for the trainer and {dims} for the server"
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        return f"{name}: dtype {str(dtype)[:40]} is unknown"
    block: Any = header.get("block")
    offsets: Any = header.get("offsets")
    flat: Any = header.get("flat")
    if not (_are_counts(block, len(dims)) and _are_counts(offsets, len(dims)) and (flat is None or _are_counts(flat, 2))):
        return f"{name}: block {str(block)[:80]} at {str(offsets)[:80]}, {str(flat)[:40]} is no part of it"
    size = prod(block)
    begin, end = flat or (0, size)
    if any(at + n > dim for at, n, dim in zip(offsets, block, dims, strict=True)) or not begin <= end <= size:
        return f"{name}: block {block} at {offsets}, {flat} is beyond {dims}"
    num_bytes = (end - begin) * _DTYPES[dtype].itemsize
    return "" if header.get("bytes") == num_bytes else f"{name}: {str(header.get('bytes'))[:40]} bytes came, and {num_bytes} make its shard"


def _are_counts(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(type(n) is int and n >= 0 for n in values)


def _store_shard(staged: _StagedVersion, header: dict[str, Any], data: bytes) -> str:
    name, shape = header["name"], tuple(header["shape"])
    values = torch.frombuffer(bytearray(data), dtype=_DTYPES[header["dtype"]]) if data else torch.empty(0, dtype=_DTYPES[header["dtype"]])
    tensor = staged.tensors.setdefault(name, torch.zeros(shape, dtype=values.dtype))
    is_received = staged.is_received.setdefault(name, torch.zeros(shape, dtype=torch.bool))
    block = tuple(slice(begin, begin + size) for begin, size in zip(header["offsets"], header["block"], strict=True))
    begin, end = header["flat"] or (0, values.numel())
    positions = torch.arange(is_received.numel()).view(shape)[block].reshape(-1)[begin:end]
    if is_received.view(-1)[positions].any():
        return f"{name}: elements came twice"
    is_received.view(-1)[positions] = True
    tensor.view(-1)[positions] = values
    return ""


def _find_mismatch(module: nn.Module, staged: _StagedVersion) -> str:
    expected = _named_tensors(module)
    if missing := sorted(set(expected) ^ set(staged.tensors)):
        return f"the server's model and the trainer's differ in {', '.join(missing[:5])}"
    for name, tensor in staged.tensors.items():
        if tuple(tensor.shape) != tuple(expected[name].shape):
            return f"{name} is {list(tensor.shape)} for the trainer and {list(expected[name].shape)} for the server"
        if not staged.is_received[name].all():
            return f"{name}: {int((~staged.is_received[name]).sum())} elements did not come"
    return ""
