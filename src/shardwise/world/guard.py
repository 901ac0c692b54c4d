"""An authenticated relay to a store for holders of the run's token. In: a socket or an address, and the token. Out: relayed bytes.

The store itself listens on loopback. Both ends prove that they have the token (HMAC-SHA256 of two nonces) within `ANSWER_S` in all, and
every later message carries its own HMAC, with a key of the connection and its sequence number: forged, repeated or missing messages end the
connection. Nothing is encrypted. Clients that have not proven the token are few at a time, the oldest give way, and a process without free
descriptors goes on to accept. Ends on loopback take connections of this process's user only. Not modelled: torch's own store, which other
users of its host can reach; gloo's and NCCL's own connections for tensors.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwise.errors import RunError, UsageError

TOKEN_VARIABLE = "SHARDWISE_TOKEN"  # the environment variable, the same on all ranks
NO_TOKEN = "none"  # value of TOKEN by which the user states that nobody else can reach the port
MIN_TOKEN_CHARS = 16
ANSWER_S = 10.0  # limit of the peer's whole authentication
MAX_STRANGERS = 64  # connections at a time that have not proven the token
MAX_LOCAL_CLIENTS = 256  # at a time, without a token
BACKLOG = 1024
ACCEPT_AGAIN_S = 0.05
_ESTABLISHED = "01"  # in /proc/net/tcp; a connection that its process has closed counts as root's there
# The kernel's tables of connections, and what comes before an IPv4 address: torch's store connects by IPv6 sockets to IPv4 addresses.
_CONNECTION_TABLES = {"/proc/net/tcp": "", "/proc/net/tcp6": "0000000000000000FFFF0000"}
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
    serve_authenticated(listener, token, lambda client: _relay_bytes(socket.create_connection(("127.0.0.1", port)), client))


def serve_streams(listener: socket.socket, token: bytes, serve: Callable[[socket.socket], None]) -> None:
    """Call `serve` in a thread with a stream of every client of `listener` that has the token, or without a token of every client that is
    a process of this one's user on this host."""
    if token:
        serve_authenticated(listener, token, lambda client: serve(_stream_of(client)))
        return
    clients = LimitedClients(MAX_LOCAL_CLIENTS)

    def admit_client(client: socket.socket) -> None:
        if not is_same_user(client):
            raise ConnectionError("another user of this host")
        with clients.serve_within_limit(client):
            serve(client)

    accept_clients(listener, admit_client)


def serve_authenticated(listener: socket.socket, token: bytes, serve: Callable[[_AuthenticatedConnection], None]) -> None:
    """Call `serve` in a thread with every client of `listener` that proves the token."""
    strangers = LimitedClients(MAX_STRANGERS)

    def admit_client(client: socket.socket) -> None:
        with strangers.serve_within_limit(client):
            connection = _authenticate_client(client, token)
        serve(connection)

    accept_clients(listener, admit_client)


class LimitedClients:
    """Clients of which there are at most `limit` at a time: one more ends the oldest."""

    def __init__(self, limit: int) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._clients: dict[socket.socket, None] = {}

    @contextmanager
    def serve_within_limit(self, client: socket.socket) -> Iterator[None]:
        """Context of a thread that serves a client."""
        with self._lock:
            self._clients[client] = None
            for oldest in list(self._clients)[: -self._limit]:
                _shut_down(oldest)  # its thread closes it
                del self._clients[oldest]
        try:
            yield
        finally:
            with self._lock:
                self._clients.pop(client, None)


def accept_clients(listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Call `serve` in a thread of its own with every client, until the listener is closed. Without free descriptors it waits."""

    def serve_client(client: socket.socket) -> None:
        try:
            serve(client)
        except (OSError, RuntimeError):  # of the client, or no thread or descriptor is free
            client.close()

    def accept() -> None:
        while listener.fileno() >= 0:
            try:
                client, _ = listener.accept()
            except OSError:  # one client's, or too many open files; or the listener is closed
                time.sleep(ACCEPT_AGAIN_S)
                continue
            try:
                _start_thread(serve_client, client)
            except RuntimeError:  # no more threads
                client.close()

    _start_thread(accept)


def is_same_user(client: socket.socket) -> bool:
    """Return whether a client on this host is a living process of this one's user, or of root; True where the system does not say."""
    (address, port), (own_address, own_port) = client.getpeername()[:2], client.getsockname()[:2]
    ends = [f"{socket.inet_aton(host)[::-1].hex().upper()}:{number:04X}" for host, number in ((address, port), (own_address, own_port))]
    try:
        tables = [(Path(name).read_text(), prefix) for name, prefix in _CONNECTION_TABLES.items() if Path(name).exists()]
    except OSError:
        return True
    rows = [(line.split(), [*(prefix + end for end in ends), _ESTABLISHED]) for text, prefix in tables for line in text.splitlines()[1:]]
    return not tables or any(row[1:4] == wanted and int(row[7]) in (0, os.getuid()) for row, wanted in rows)


def connect_authenticated(address: str, port: int, token: bytes) -> socket.socket:
    """Return a stream to `serve_streams` at an address. Raises RunError for another token, OSError if nobody answers."""
    try:
        return _stream_of(_connect_authenticated(address, port, token))
    except _AuthenticationFailed as error:
        raise _other_token(address, port) from error


def connect_relay(address: str, port: int, token: bytes, wait_s: float) -> int:
    """Return a loopback port that leads to `serve_relay` at an address. Raises RunError if nothing listens there, or with another token."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            _connect_authenticated(address, port, token).close()
            break
        except _AuthenticationFailed as error:
            raise _other_token(address, port) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunError(f"nobody answers at {address}:{port}: {error}") from error
            time.sleep(0.05)
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)

    def relay_client(near: socket.socket) -> None:
        if not is_same_user(near):
            raise ConnectionError("another user of this host")
        _relay_bytes(near, _connect_authenticated(address, port, token))

    accept_clients(listener, relay_client)
    return int(listener.getsockname()[1])


def _other_token(address: str, port: int) -> RunError:
    return RunError(f"{address}:{port} does not have this rank's {TOKEN_VARIABLE}, or has just ended; give all ranks the same")


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


def _authenticate_client(client: socket.socket, token: bytes) -> _AuthenticatedConnection:
    """Raises OSError if the client does not prove the token in time."""
    deadline = time.monotonic() + ANSWER_S
    own_nonce = secrets.token_bytes(_NONCE)
    client.settimeout(ANSWER_S)
    client.sendall(own_nonce)
    nonces = own_nonce + _receive_exactly(client, _NONCE, deadline)
    if not hmac.compare_digest(_receive_exactly(client, _MAC, deadline), _message_mac(token, b"connects", nonces)):
        raise _AuthenticationFailed("another token")
    client.sendall(_message_mac(token, b"accepts", nonces))
    client.settimeout(None)
    return _AuthenticatedConnection(client, token, nonces, first=True)


def _stream_of(far: _AuthenticatedConnection) -> socket.socket:
    """Return one end of a pair of sockets whose other end is relayed to an authenticated connection."""
    own, near = socket.socketpair()
    _relay_bytes(near, far)
    return own


def _connect_authenticated(address: str, port: int, token: bytes) -> _AuthenticatedConnection:
    """Connect to a relay. Raises _AuthenticationFailed if the peer does not prove the token, OSError if there is none or it is too slow."""
    deadline = time.monotonic() + ANSWER_S
    connection = socket.create_connection((address, port), ANSWER_S)
    try:
        peer_nonce, own_nonce = _receive_exactly(connection, _NONCE, deadline), secrets.token_bytes(_NONCE)
    except OSError:
        connection.close()
        raise
    nonces = peer_nonce + own_nonce
    try:
        connection.sendall(own_nonce + _message_mac(token, b"connects", nonces))
        if not hmac.compare_digest(_receive_exactly(connection, _MAC, deadline), _message_mac(token, b"accepts", nonces)):
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

    if near.family != socket.AF_UNIX:
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    far.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _start_thread(send_out)
    _start_thread(send_back)


def _shut_down(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _receive_exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    data = b""
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        received = connection.recv(size - len(data))
        if not received:
            raise ConnectionError("it closed the connection")
        data += received
    return data


def _message_mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, b"".join(parts), hashlib.sha256).digest()


def _start_thread(work: Callable[..., None], *args: object) -> None:
    threading.Thread(target=work, args=args, daemon=True, name="shardwise-guard").start()
