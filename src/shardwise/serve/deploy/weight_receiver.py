"""Live weight updates of a served model: training ranks send shards over TCP, and the model switches between two batches.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.world import guard

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
WAIT_S = 120.0


@dataclass
class _StagedVersion:
    """A version in transfer: tensors, masks of received elements, and how many ranks have sent all and committed."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    is_received: dict[str, Tensor] = field(default_factory=dict)
    num_sent: int = 0
    num_committed: int = 0
    error: str = ""


class WeightReceiver:
    """Listens at a free port of loopback; with a `token` also at `host`, for clients that have it (`shardwise.world.guard`). `lock`: held
    while the model computes a batch, and while it switches weights. `newest_file`: the newest version, written and read by all
    replicas of the model."""

    def __init__(self, module: nn.Module, host: str = "", token: str = "", newest_file: Path | None = None) -> None:
        self.module, self.version, self.received_bytes = module, 0, 0
        self.lock = threading.Lock()
        self._newest_file = newest_file
        if newest_file is not None and newest_file.exists():
            with safe_open(newest_file, "pt") as file:
                self._load_weights(int(file.metadata()["version"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        self._staged: dict[int, _StagedVersion] = {}
        self._condition = threading.Condition()
        self._listeners = [socket.create_server(("127.0.0.1", 0))]
        self.address: tuple[str, int] = self._listeners[0].getsockname()[:2]
        if host and token:
            self._listeners.append(socket.create_server((host, 0)))
            guard.serve_relay(self._listeners[1], guard.validate_token(token), self.address[1])
            self.address = self._listeners[1].getsockname()[:2]
        # This replica's staged file, until all ranks have committed.
        self._staged_file = newest_file.with_name(f".{self.address[1]}-{newest_file.name}") if newest_file is not None else Path()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listeners:
            listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listeners[0].accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        with connection, connection.makefile("rb") as stream:
            try:
                head = json.loads(stream.readline())
                version = head["version"]
                with self._condition:
                    staged = self._staged.setdefault(version, _StagedVersion())
                try:
                    self._receive(connection, stream, staged, version, head["ranks"], head["pieces"])
                finally:  # in use or discarded: ranks may send this version again
                    with self._condition:
                        if self._staged.get(version) is staged:
                            del self._staged[version]
            except (OSError, ValueError, KeyError, EOFError):
                return  # the rank failed: nothing is committed

    def _receive(self, connection: socket.socket, stream: BinaryIO, staged: _StagedVersion, version: int, ranks: int, pieces: int) -> None:
        for _ in range(pieces):
            piece = json.loads(stream.readline())
            data = stream.read(piece["bytes"])
            if len(data) < piece["bytes"]:
                raise EOFError
            with self._condition:
                self.received_bytes += len(data)
                staged.error = staged.error or _store_shard(staged, piece, data)
        with self._condition:
            staged.num_sent += 1
            if staged.num_sent == ranks:
                staged.error = staged.error or _find_mismatch(self.module, staged) or self._write(version, staged.tensors)
            self._condition.notify_all()
            all_sent = self._condition.wait_for(lambda: staged.num_sent >= ranks, WAIT_S)
            trouble = staged.error or ("" if all_sent else "not all ranks sent their part in time")
        connection.sendall(json.dumps({"error": trouble}).encode() + b"\n")
        committed = json.loads(stream.readline())["commit"]
        with self._condition:
            if not committed or trouble:
                return
            staged.num_committed += 1
            if staged.num_committed == ranks:
                self._switch_version(version, staged)
            self._condition.notify_all()
            done = self._condition.wait_for(lambda: staged.num_committed >= ranks, WAIT_S)
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
