"""An authenticated relay to a store for holders of the run's token. In: a socket or an address, and the token. Out: relayed bytes.

The store itself listens on loopback. Both ends prove that they have the token (HMAC-SHA256 of two nonces), and every later message
carries its own HMAC, with a key of the connection and its sequence number: forged, repeated or missing messages end the connection. Nothing
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
NONE = "none"  # value of TOKEN by which the user states that nobody else can reach the port
SHORTEST = 16
ANSWER_S = 10.0  # timeout of the peer's authentication
_NONCE, _MAC, _LARGEST = 32, 32, 1 << 16
_HEAD = struct.Struct("<I")


class _Refused(OSError):
    """The peer has no token, or another."""


def checked(token: str) -> bytes:
    """Return a token as a key. Raises UsageError for one that could be guessed."""
    if len(token) < SHORTEST:
        raise UsageError(f"{TOKEN} has {len(token)} characters; give it {SHORTEST} at least, `openssl rand -hex 16`, the same on all ranks")
    return token.encode()


def serve(listener: socket.socket, token: bytes, port: int) -> None:
    """Relay clients of `listener` that have the token to `port` of loopback, for as long as this process lives."""

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            _start(_admit, client, token, port)

    _start(accept)


def reach(address: str, port: int, token: bytes, wait_s: float) -> int:
    """Return a loopback port that leads to `serve_relay` at an address. Raises RunError if nothing listens there, or with another token."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            _connected(address, port, token).close()
            break
        except _Refused as error:
            raise RunError(f"{address}:{port} does not have this rank's {TOKEN}, or has just ended; give all ranks the same") from error
        except OSError as error:
            if time.monotonic() > deadline:
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
    """A connection whose messages are authenticated. `first`: True on the end that accepted it."""

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
        """Return the next message; empty at the end. Raises OSError for one that is not the peer's next."""
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


def _admit(client: socket.socket, token: bytes, port: int) -> None:
    try:
        client.settimeout(ANSWER_S)
        own_nonce = secrets.token_bytes(_NONCE)
        client.sendall(own_nonce)
        nonces = own_nonce + _exactly(client, _NONCE)
        if not hmac.compare_digest(_exactly(client, _MAC), _mac(token, b"connects", nonces)):
            client.close()
            return
        client.sendall(_mac(token, b"accepts", nonces))
        client.settimeout(None)
        _relay(socket.create_connection(("127.0.0.1", port)), _Far(client, token, nonces, first=True))
    except OSError:
        client.close()


def _connected(address: str, port: int, token: bytes) -> _Far:
    """Connect to a relay. Raises _Refused if the peer fails to authenticate, OSError if there is none or it does not answer in time."""
    connection = socket.create_connection((address, port), ANSWER_S)
    try:
        peer_nonce, own_nonce = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
    except OSError:
        connection.close()
        raise
    nonces = peer_nonce + own_nonce
    try:
        connection.sendall(own_nonce + _mac(token, b"connects", nonces))
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
    """Relay bytes in both directions, until one end closes."""

    def send_out() -> None:
        with suppress(OSError):
            while data := near.recv(_LARGEST):
                far.send(data)
        _shut(far.connection)

    def send_back() -> None:
        with suppress(OSError):
            while data := far.recv():
                near.sendall(data)
        _shut(near)
        _shut(far.connection)

    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _start(send_out)
    _start(send_back)


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionError("it closed the connection")
        data += received
    return data


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _start(work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=work, args=args, daemon=True, name="weft-guard").start()
