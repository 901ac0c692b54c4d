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

from weft.world import guard

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
WAIT_S = 120.0


@dataclass
class _Staged:
    """A version in transfer: tensors, masks of received elements, and how many ranks have sent all and committed."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    there: dict[str, Tensor] = field(default_factory=dict)
    sent: int = 0
    committed: int = 0
    trouble: str = ""


class Receiver:
    """Listens at a free port of loopback; with a `token` also at `host`, for clients that have it (`weft.world.guard`). `lock`: held
    while the model computes a batch, and while it switches weights. `newest_file`: the newest version, written and read by all
    replicas of the model."""

    def __init__(self, module: nn.Module, host: str = "", token: str = "", newest: Path | None = None) -> None:
        self.module, self.version, self.received_bytes = module, 0, 0
        self.lock = threading.Lock()
        self._newest = newest
        if newest is not None and newest.exists():
            with safe_open(newest, "pt") as file:
                self._set(int(file.metadata()["version"]), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        self._staged: dict[int, _Staged] = {}
        self._changed = threading.Condition()
        self._listening = [socket.create_server(("127.0.0.1", 0))]
        self.address: tuple[str, int] = self._listening[0].getsockname()[:2]
        if host and token:
            self._listening.append(socket.create_server((host, 0)))
            guard.serve(self._listening[1], guard.checked(token), self.address[1])
            self.address = self._listening[1].getsockname()[:2]
        # This replica's staged file, until all ranks have committed.
        self._new = newest.with_name(f".{self.address[1]}-{newest.name}") if newest is not None else Path()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        for listener in self._listening:
            listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening[0].accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        with connection, connection.makefile("rb") as stream:
            try:
                head = json.loads(stream.readline())
                version = head["version"]
                with self._changed:
                    staged = self._staged.setdefault(version, _Staged())
                try:
                    self._receive(connection, stream, staged, version, head["ranks"], head["pieces"])
                finally:  # in use or discarded: ranks may send this version again
                    with self._changed:
                        if self._staged.get(version) is staged:
                            del self._staged[version]
            except (OSError, ValueError, KeyError, EOFError):
                return  # the rank failed: nothing is committed

    def _receive(self, connection: socket.socket, stream: BinaryIO, staged: _Staged, version: int, ranks: int, pieces: int) -> None:
        for _ in range(pieces):
            piece = json.loads(stream.readline())
            data = stream.read(piece["bytes"])
            if len(data) < piece["bytes"]:
                raise EOFError
            with self._changed:
                self.received_bytes += len(data)
                staged.trouble = staged.trouble or _lay(staged, piece, data)
        with self._changed:
            staged.sent += 1
            if staged.sent == ranks:
                staged.trouble = staged.trouble or _misfit(self.module, staged) or self._write(version, staged.tensors)
            self._changed.notify_all()
            all_sent = self._changed.wait_for(lambda: staged.sent >= ranks, WAIT_S)
            trouble = staged.trouble or ("" if all_sent else "not all ranks sent their part in time")
        connection.sendall(json.dumps({"error": trouble}).encode() + b"\n")
        committed = json.loads(stream.readline())["commit"]
        with self._changed:
            if not committed or trouble:
                return
            staged.committed += 1
            if staged.committed == ranks:
                self._turn_to(version, staged)
            self._changed.notify_all()
            done = self._changed.wait_for(lambda: staged.committed >= ranks, WAIT_S)
        connection.sendall(json.dumps({"error": "" if done else "not all ranks committed"}).encode() + b"\n")

    def _turn_to(self, version: int, staged: _Staged) -> None:
        if self._newest is not None:
            os.replace(self._new, self._newest)
        self._set(version, staged.tensors)

    def _set(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        with self.lock, torch.no_grad():
            for name, tensor in _held(self.module).items():
                tensor.copy_(tensors[name])
            self.version = version

    def _write(self, version: int, tensors: dict[str, Tensor]) -> str:
        """Write the staged version to a file; return why that failed, else an empty string."""
        try:
            if self._newest is not None:
                self._new.parent.mkdir(parents=True, exist_ok=True)
                save_file(tensors, self._new, {"version": str(version)})
        except (OSError, SafetensorError) as error:
            return f"{self._newest} cannot be written: {error}"
        return ""


def _held(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, tied ones once, under the trainer's names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _lay(staged: _Staged, piece: dict[str, Any], data: bytes) -> str:
    name, shape = piece["name"], tuple(piece["shape"])
    values = torch.frombuffer(bytearray(data), dtype=_DTYPES[piece["dtype"]]) if data else torch.empty(0, dtype=_DTYPES[piece["dtype"]])
    tensor = staged.tensors.setdefault(name, torch.zeros(shape, dtype=values.dtype))
    is_received = staged.there.setdefault(name, torch.zeros(shape, dtype=torch.bool))
    block = tuple(slice(begin, begin + size) for begin, size in zip(piece["offsets"], piece["block"], strict=True))
    begin, end = piece["flat"] or (0, values.numel())
    positions = torch.arange(is_received.numel()).view(shape)[block].reshape(-1)[begin:end]
    if is_received.view(-1)[positions].any():
        return f"{name}: elements came twice"
    is_received.view(-1)[positions] = True
    tensor.view(-1)[positions] = values
    return ""


def _misfit(module: nn.Module, staged: _Staged) -> str:
    expected = _held(module)
    if missing := sorted(set(expected) ^ set(staged.tensors)):
        return f"the server's model and the trainer's differ in {', '.join(missing[:5])}"
    for name, tensor in staged.tensors.items():
        if tuple(tensor.shape) != tuple(expected[name].shape):
            return f"{name} is {list(tensor.shape)} for the trainer and {list(expected[name].shape)} for the server"
        if not staged.there[name].all():
            return f"{name}: {int((~staged.there[name]).sum())} elements did not come"
    return ""
