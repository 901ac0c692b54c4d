"""A way to a store that only those who have the run's token can go. In: a socket or an address, and the token. Out: relayed bytes.

The store itself listens on loopback. Both ends prove that they have the token (HMAC-SHA256 of two random numbers), and every message after
that carries its own HMAC, with a key of the connection and its number: what is forged, repeated or left out ends the connection. Nothing
is encrypted. Not modelled: other users of the same host, who can reach loopback; gloo's and NCCL's own connections for tensors.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from weft.errors import RunError, UsageError

TOKEN = "WEFT_TOKEN"  # the environment variable, the same on all ranks
NONE = "none"  # in its place: nobody else reaches the port, says whoever starts the ranks
SHORTEST = 16
ANSWER_S = 10.0  # for the other end to prove itself
_NONCE, _MAC, _LARGEST = 32, 32, 1 << 16
_HEAD = struct.Struct("<I")


class _Refused(OSError):
    """The other end has no token, or another."""


def checked(token: str) -> bytes:
    """A token as a key. Raises UsageError for one that could be guessed."""
    if len(token) < SHORTEST:
        raise UsageError(f"{TOKEN} has {len(token)} characters; give it {SHORTEST} at least, `openssl rand -hex 16`, the same on all ranks")
    return token.encode()


def serve(listener: socket.socket, token: bytes, port: int) -> None:
    """Relay who comes to `listener` with the token to `port` of loopback, for as long as this process lives."""

    def accept() -> None:
        while True:
            try:
                stranger, _ = listener.accept()
            except OSError:
                return
            _start(_admit, stranger, token, port)

    _start(accept)


def reach(address: str, port: int, token: bytes, wait_s: float) -> int:
    """A port of loopback that leads to `serve` at an address. Raises RunError where nobody is there, or one with another token."""
    until = time.monotonic() + wait_s
    while True:
        try:
            _connected(address, port, token).close()
            break
        except _Refused as error:
            raise RunError(f"{address}:{port} does not have this rank's {TOKEN}, or has just ended; give all ranks the same") from error
        except OSError as error:
            if time.monotonic() > until:
                raise RunError(f"nobody answers at {address}:{port}: {error}") from error
            time.sleep(0.05)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            try:
                _relay(near, _connected(address, port, token))
            except OSError:
                near.close()

    _start(accept)
    return int(listener.getsockname()[1])


class _Far:
    """A connection whose messages are authenticated. `first`: whether this end accepted it."""

    def __init__(self, connection: socket.socket, token: bytes, nonces: bytes, first: bool) -> None:
        self.connection = connection
        keys = [_mac(token, side, nonces) for side in (b"of who accepts", b"of who connects")]
        self._mine, self._theirs = keys if first else keys[::-1]
        self._sent = self._received = 0

    def send(self, data: bytes) -> None:
        number = struct.pack("<Q", self._sent)
        self._sent += 1
        self.connection.sendall(_HEAD.pack(len(data)) + _mac(self._mine, number, data) + data)

    def recv(self) -> bytes:
        """The next message; empty at the end. Raises OSError for one that is not the other end's next."""
        head = self.connection.recv(1, socket.MSG_PEEK)
        if not head:
            return b""
        (size,) = _HEAD.unpack(_exactly(self.connection, _HEAD.size))
        if not 0 < size <= _LARGEST:
            raise _Refused(f"a message of {size} bytes")
        mac, data = _exactly(self.connection, _MAC), _exactly(self.connection, size)
        if not hmac.compare_digest(mac, _mac(self._theirs, struct.pack("<Q", self._received), data)):
            raise _Refused("a message that the other end has not sent, or not now")
        self._received += 1
        return data

    def close(self) -> None:
        self.connection.close()


def _admit(stranger: socket.socket, token: bytes, port: int) -> None:
    try:
        stranger.settimeout(ANSWER_S)
        mine = secrets.token_bytes(_NONCE)
        stranger.sendall(mine)
        nonces = mine + _exactly(stranger, _NONCE)
        if not hmac.compare_digest(_exactly(stranger, _MAC), _mac(token, b"connects", nonces)):
            stranger.close()
            return
        stranger.sendall(_mac(token, b"accepts", nonces))
        stranger.settimeout(None)
        _relay(socket.create_connection(("127.0.0.1", port)), _Far(stranger, token, nonces, first=True))
    except OSError:
        stranger.close()


def _connected(address: str, port: int, token: bytes) -> _Far:
    """Raises _Refused where the other end does not prove itself, OSError where there is none, or it does not answer in time."""
    connection = socket.create_connection((address, port), ANSWER_S)
    try:
        theirs, mine = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
    except OSError:
        connection.close()
        raise
    nonces = theirs + mine
    try:
        connection.sendall(mine + _mac(token, b"connects", nonces))
        if not hmac.compare_digest(_exactly(connection, _MAC), _mac(token, b"accepts", nonces)):
            raise _Refused("another token")
    except TimeoutError:
        connection.close()
        raise
    except ConnectionError as error:
        connection.close()
        raise _Refused(str(error)) from error
    connection.settimeout(None)
    return _Far(connection, token, nonces, first=False)


def _relay(near: socket.socket, far: _Far) -> None:
    """Pass on what comes from either end, until one closes."""

    def out() -> None:
        with suppress(OSError):
            while data := near.recv(_LARGEST):
                far.send(data)
        _shut(far.connection)

    def back() -> None:
        with suppress(OSError):
            while data := far.recv():
                near.sendall(data)
        _shut(near)
        _shut(far.connection)

    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _start(out)
    _start(back)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("it closed the connection")
        data += more
    return data


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _start(work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=work, args=args, daemon=True, name="weft-guard").start()
