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

from shardwise.errors import RunError, UsageError

TOKEN_VARIABLE = "SHARDWISE_TOKEN"  # the environment variable, the same on all ranks
NO_TOKEN = "none"  # value of TOKEN by which the user states that nobody else can reach the port
MIN_TOKEN_CHARS = 16
ANSWER_S = 10.0  # timeout of the peer's authentication
_NONCE, _MAC, _LARGEST = 32, 32, 1 << 16
_HEAD = struct.Struct("<I")


class _AuthenticationFailed(OSError):
    """The peer has no token, or another."""


def validate_token(token: str) -> bytes:
    """Return a token as a key. Raises UsageError for one that could be guessed."""
    if len(token) < MIN_TOKEN_CHARS:
        raise UsageError(
            f"{TOKEN_VARIABLE} has {len(token)} characters; give it {MIN_TOKEN_CHARS} at least, `openssl rand -hex 16`, the same on all "
            f"ranks"
        )
    return token.encode()


def serve_relay(listener: socket.socket, token: bytes, port: int) -> None:
    """Relay clients of `listener` that have the token to `port` of loopback, for as long as this process lives."""

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            _start_thread(_admit_client, client, token, port)

    _start_thread(accept)


def connect_relay(address: str, port: int, token: bytes, wait_s: float) -> int:
    """Return a loopback port that leads to `serve_relay` at an address. Raises RunError if nothing listens there, or with another token."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            _connect_authenticated(address, port, token).close()
            break
        except _AuthenticationFailed as error:
            raise RunError(
                f"{address}:{port} does not have this rank's {TOKEN_VARIABLE}, or has just ended; give all ranks the same"
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"nobody answers at {address}:{port}: {error}") from error
            time.sleep(0.05)
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            try:
                _relay_bytes(near, _connect_authenticated(address, port, token))
            except OSError:
                near.close()

    _start_thread(accept)
    return int(listener.getsockname()[1])


class _AuthenticatedConnection:
    """A connection whose messages are authenticated. `first`: True on the end that accepted it."""

    def __init__(self, connection: socket.socket, token: bytes, nonces: bytes, first: bool) -> None:
        self.connection = connection
        keys = [_message_mac(token, side, nonces) for side in (b"of who accepts", b"of who connects")]
        self._send_key, self._receive_key = keys if first else keys[::-1]
        self._sent = self._received = 0

    def send(self, data: bytes) -> None:
        number = struct.pack("<Q", self._sent)
        self._sent += 1
        self.connection.sendall(_HEAD.pack(len(data)) + _message_mac(self._send_key, number, data) + data)

    def recv(self) -> bytes:
        """Return the next message; empty at the end. Raises OSError for one that is not the peer's next."""
        head = self.connection.recv(1, socket.MSG_PEEK)
        if not head:
            return b""
        (size,) = _HEAD.unpack(_receive_exactly(self.connection, _HEAD.size))
        if not 0 < size <= _LARGEST:
            raise _AuthenticationFailed(f"a message of {size} bytes")
        mac, data = _receive_exactly(self.connection, _MAC), _receive_exactly(self.connection, size)
        if not hmac.compare_digest(mac, _message_mac(self._receive_key, struct.pack("<Q", self._received), data)):
            raise _AuthenticationFailed("a message that the other end has not sent, or not now")
        self._received += 1
        return data

    def close(self) -> None:
        self.connection.close()


def _admit_client(client: socket.socket, token: bytes, port: int) -> None:
    try:
        client.settimeout(ANSWER_S)
        own_nonce = secrets.token_bytes(_NONCE)
        client.sendall(own_nonce)
        nonces = own_nonce + _receive_exactly(client, _NONCE)
        if not hmac.compare_digest(_receive_exactly(client, _MAC), _message_mac(token, b"connects", nonces)):
            client.close()
            return
        client.sendall(_message_mac(token, b"accepts", nonces))
        client.settimeout(None)
        _relay_bytes(socket.create_connection(("127.0.0.1", port)), _AuthenticatedConnection(client, token, nonces, first=True))
    except OSError:
        client.close()


def _connect_authenticated(address: str, port: int, token: bytes) -> _AuthenticatedConnection:
    """Connect to a relay. Raises _Refused if the peer fails to authenticate, OSError if there is none or it does not answer in time."""
    connection = socket.create_connection((address, port), ANSWER_S)
    try:
        peer_nonce, own_nonce = _receive_exactly(connection, _NONCE), secrets.token_bytes(_NONCE)
    except OSError:
        connection.close()
        raise
    nonces = peer_nonce + own_nonce
    try:
        connection.sendall(own_nonce + _message_mac(token, b"connects", nonces))
        if not hmac.compare_digest(_receive_exactly(connection, _MAC), _message_mac(token, b"accepts", nonces)):
            raise _AuthenticationFailed("another token")
    except TimeoutError:
        connection.close()
        raise
    except ConnectionError as error:
        connection.close()
        raise _AuthenticationFailed(str(error)) from error
    connection.settimeout(None)
    return _AuthenticatedConnection(connection, token, nonces, first=False)


def _relay_bytes(near: socket.socket, far: _AuthenticatedConnection) -> None:
    """Relay bytes in both directions, until one end closes."""

    def send_out() -> None:
        with suppress(OSError):
            while data := near.recv(_LARGEST):
                far.send(data)
        _shut_down(far.connection)

    def send_back() -> None:
        with suppress(OSError):
            while data := far.recv():
                near.sendall(data)
        _shut_down(near)
        _shut_down(far.connection)

    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _start_thread(send_out)
    _start_thread(send_back)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionError("it closed the connection")
        data += received
    return data


def _message_mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _start_thread(work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=work, args=args, daemon=True, name="shardwise-guard").start()
