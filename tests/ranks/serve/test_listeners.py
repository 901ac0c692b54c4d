"""Listeners and strangers: nothing is taken without the token, on loopback too; nobody keeps a listener from serving others."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from shardwise.errors import RunError
from shardwise.run import publish
from shardwise.serve.deploy import weight_receiver
from shardwise.serve.deploy.weight_receiver import WeightReceiver
from shardwise.world import guard

TOKEN = "an elephant never forgets"


@contextmanager
def served(token: str = "", host: str = "") -> Iterator[WeightReceiver]:
    receiver = WeightReceiver(torch.nn.Linear(4, 2), host=host, token=token)
    try:
        yield receiver
    finally:
        receiver.close()


def header(label: str, tensor: torch.Tensor, **changes: Any) -> dict[str, Any]:
    shape = list(tensor.shape)
    made = {"name": label, "shape": shape, "dtype": "F32", "offsets": [0] * len(shape), "block": shape, "flat": None}
    return made | {"bytes": tensor.numel() * 4} | changes


def message(version: int, value: float, **changes: Any) -> bytes:
    """All that one rank sends: a version whose weights and biases have this value. `changes` are of the first header."""
    tensors = {"weight": torch.full((2, 4), value), "bias": torch.full((2,), value)}
    data = json.dumps({"version": version, "rank": 0, "ranks": 1, "pieces": 2}).encode() + b"\n"
    for name, tensor in tensors.items():
        data += json.dumps(header(name, tensor, **changes)).encode() + b"\n" + tensor.numpy().tobytes()
        changes = {}
    return data + b'{"commit": true}\n'


def said(connection: socket.socket, data: bytes) -> list[dict[str, Any]]:
    """What comes back until the end of the connection."""
    back = b""
    with suppress(OSError), connection:
        connection.settimeout(20)
        connection.sendall(data)
        while more := connection.recv(1 << 16):
            back += more
    return [json.loads(line) for line in back.splitlines()] if back.startswith(b"{") else []


def takes(receiver: WeightReceiver, version: int, token: str = "") -> bool:
    """Whether a rank that has the token can publish a version."""
    connection = guard.connect_authenticated(*receiver.address, token.encode()) if token else socket.create_connection(receiver.address)
    return said(connection, message(version, float(version))) == [{"error": ""}] * 2 and receiver.version == version


@pytest.mark.parametrize("host", ["", "0.0.0.0"])
def test_with_a_token_only_who_has_it_changes_weights_on_loopback_too(host: str) -> None:
    with served(TOKEN, host) as receiver:
        before = receiver.module.bias.clone()
        assert said(socket.create_connection(("127.0.0.1", receiver.address[1])), message(10**9, 666.0)) == []
        with pytest.raises(RunError, match="does not have this rank's SHARDWISE_TOKEN"):
            guard.connect_authenticated(*receiver.address, b"another token than theirs")
        assert receiver.version == 0
        assert torch.equal(receiver.module.bias, before)
        assert takes(receiver, 3, TOKEN)
        assert (receiver.module.bias == 3).all()
    with served() as receiver:  # the broken twin: nobody asks for a token, and the same message is taken
        assert said(socket.create_connection(receiver.address), message(10**9, 666.0)) == [{"error": ""}] * 2


class _Pretender:
    def __init__(self, data: bytes) -> None:
        self.settimeout, self.recv = (lambda seconds: None), (lambda size: data)


def test_a_rank_without_the_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guard.TOKEN_VARIABLE, raising=False)
    with served(TOKEN) as receiver:
        connection = publish._connect_to_replica(*receiver.address)
        assert "must have the same SHARDWISE_TOKEN" in publish._read_reply(cast(socket.socket, _Pretender(b"\xff" * 40 + b"\n")))
        connection.close()
        monkeypatch.setenv(guard.TOKEN_VARIABLE, TOKEN)
        publish._connect_to_replica(*receiver.address).close()


def test_another_user_of_the_host_is_no_client_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with served() as receiver:
        listener = socket.create_server(("127.0.0.1", 0))
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        assert guard.is_same_user(far)
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        assert guard.is_same_user(far) == (os.geteuid() == 0)  # root may
        rows = Path("/proc/net/tcp").read_text()
        uid = os.geteuid()
        monkeypatch.setattr(Path, "read_text", lambda self: "\n".join(_with_user(row, uid, 1000) for row in rows.splitlines()))
        assert not guard.is_same_user(far)
        monkeypatch.undo()
        near.close()
        time.sleep(0.1)
        assert not guard.is_same_user(far)  # a process that has gone: the table says root
        assert takes(receiver, 1)


def test_a_client_with_an_ipv6_socket_to_an_ipv4_address_is_this_user() -> None:
    """As torch's store has: the kernel lists it in another table. Only the listener's end is of the other one."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as near:
        near.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        far, _ = listener.accept()
        with far:
            assert guard.is_same_user(far)


def _with_user(row: str, before: int, after: int) -> str:
    words = row.split()
    return " ".join([*words[:7], str(after) if words[7:8] == [str(before)] else words[7], *words[8:]]) if len(words) > 8 else row


ABSURD = [
    b"\n", b"[]\n", b'{"version": 1}\n', b'{"version": [1], "ranks": 1, "pieces": 1}\n', b'{"version": 1, "ranks": 0, "pieces": 0}\n',
    b'{"version": 1, "ranks": 1, "pieces": 99999999999}\n', b"\xff\xfe\n", b"[" * 60_000 + b"\n", b"a" * 100_000,
    b'{"version": true, "ranks": 1, "pieces": 1}\n', b'{"version": -1, "ranks": 1, "pieces": 1}\n',
]  # fmt: skip
WRONG = [
    {"shape": [1000000000000]}, {"dtype": "Q9"}, {"dtype": ["F32"]}, {"name": "other"}, {"name": 3}, {"block": [2, 5]}, {"offsets": [1, 0]},
    {"offsets": [-1, 0]},
 {"flat": [3, 1]}, {"flat": [0, 9]}, {"flat": 3}, {"block": [2]}, {"bytes": 31}, {"shape": None}, {"block": [True, 4]},
]  # fmt: skip


def test_garbage_changes_nothing_and_the_next_is_served() -> None:
    with served() as receiver:
        before = {name: x.clone() for name, x in receiver.module.state_dict().items()}
        for garbage in ABSURD:
            connection = socket.create_connection(receiver.address)
            connection.sendall(garbage)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            assert all(answer["error"] for answer in said(connection, b"")), garbage
        for number, changes in enumerate(WRONG, 1):
            size = changes.get("bytes", 32)
            data = message(number, 666.0, **changes).replace(torch.full((2, 4), 666.0).numpy().tobytes(), b"x" * size, 1)
            answers = said(socket.create_connection(receiver.address), data)
            assert answers[0]["error"], changes
        assert receiver.version == 0
        assert all(torch.equal(x, before[name]) for name, x in receiver.module.state_dict().items())
        assert takes(receiver, 1)


def test_an_announced_terabyte_takes_no_memory() -> None:
    with served() as receiver:
        connection = socket.create_connection(receiver.address)
        piece = header("weight", torch.zeros(2, 4), bytes=1 << 40)
        connection.sendall(b'{"version": 1, "ranks": 1, "pieces": 1}\n' + json.dumps(piece).encode() + b"\n" + bytes(1 << 20))
        assert takes(receiver, 2)
        connection.close()


def test_slow_and_silent_strangers_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than may be there at a time, and each sends a byte now and then; one deadline is for all of it."""
    monkeypatch.setattr(guard, "ANSWER_S", 0.8)
    with served(TOKEN) as receiver:
        strangers = [socket.create_connection(receiver.address) for _ in range(2 * guard.MAX_STRANGERS)]
        assert takes(receiver, 1, TOKEN)
        ended, begun = 0, time.monotonic()
        while ended < len(strangers) and time.monotonic() - begun < 20:
            for stranger in strangers:
                with suppress(OSError):
                    stranger.send(b"x")
            time.sleep(0.2)
            ended = sum(_has_ended(stranger) for stranger in strangers)
        assert ended == len(strangers)  # 64 bytes at five a second would have taken 13 s
        assert time.monotonic() - begun < 10


def _has_ended(connection: socket.socket) -> bool:
    connection.settimeout(0)
    try:
        while data := connection.recv(1 << 16):
            del data
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_without_free_descriptors_a_listener_goes_on_afterwards() -> None:
    with served(TOKEN) as receiver:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = len(os.listdir("/proc/self/fd"))
        clients: list[socket.socket] = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
            with suppress(OSError):
                while True:
                    clients.append(socket.socket())
                    clients[-1].connect(receiver.address)
            time.sleep(0.2)
            threads = threading.active_count()
        finally:
            for client in clients:
                client.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert threads > 1
        assert takes(receiver, 1, TOKEN)


def test_a_header_that_is_not_checked_would_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of the checks of headers."""
    data = message(1, 666.0, flat=[0, 9])
    with served() as receiver:
        assert said(socket.create_connection(receiver.address), data)[0]["error"]
        monkeypatch.setattr(weight_receiver, "_find_wrong_header", lambda header, expected: "")
        assert not said(socket.create_connection(receiver.address), data)[0]["error"]
