"""The guarded way to a store, against whoever stands between its ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from shardwise.errors import RunError
from shardwise.world import guard

TOKEN = b"the same on all ranks"


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says again what it hears."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer(one: socket.socket) -> None:
            with suppress(OSError):
                while data := one.recv(1 << 16):
                    one.sendall(data)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def between(port: int, change: Callable[[bytes], bytes]) -> int:
    """A port that leads to another through somebody who changes what goes there, but for the first answer."""
    server = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket, changes: bool) -> None:
        first = True
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(data) if changes and not first else data)
                first = False
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", port))
            for pair in ((near, far, True), (far, near, False)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def said(port: int, data: bytes) -> bytes:
    """What comes back for `data` until the end of the connection, or as much."""
    with socket.create_connection(("127.0.0.1", port), 10) as one:
        one.sendall(data)
        back = b""
        with suppress(ConnectionError):
            while len(back) < len(data) and (more := one.recv(1 << 16)):
                back += more
        return back


def guarded(port: int) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    guard.serve_relay(listener, TOKEN, port)
    return int(listener.getsockname()[1])


def test_bytes_come_through_unchanged(echo: int) -> None:
    data = bytes(range(256)) * 4096
    assert said(guard.connect_relay("127.0.0.1", guarded(echo), TOKEN, 10.0), data) == data


CHANGES = {"flip": lambda x: x[:-1] + bytes([x[-1] ^ 1]), "half": lambda x: x[len(x) // 2 :]}


@pytest.mark.parametrize("how", CHANGES)
def test_what_is_forged_or_left_out_ends_the_connection(echo: int, how: str) -> None:
    assert said(guard.connect_relay("127.0.0.1", between(guarded(echo), lambda x: x), TOKEN, 10.0), b"step") == b"step"
    assert said(guard.connect_relay("127.0.0.1", between(guarded(echo), CHANGES[how]), TOKEN, 10.0), b"step") == b""


def test_what_is_repeated_comes_once(echo: int) -> None:
    way = guard.connect_relay("127.0.0.1", between(guarded(echo), lambda x: x + x), TOKEN, 10.0)
    with socket.create_connection(("127.0.0.1", way), 10) as one:
        one.sendall(b"step")
        heard = b""
        while more := one.recv(64):
            heard += more
    assert heard in (b"", b"step")


def test_another_token_is_told(echo: int) -> None:
    with pytest.raises(RunError, match="does not have this rank's SHARDWISE_TOKEN"):
        guard.connect_relay("127.0.0.1", guarded(echo), b"another on this rank", 10.0)


def test_nobody_there_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(RunError, match="nobody answers"):
        guard.connect_relay("127.0.0.1", port, TOKEN, 0.2)
