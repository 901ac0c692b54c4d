"""Publish weights to running inference servers without a file. In: this rank's shards, addresses of replicas. Out: bytes sent.

Every element is sent once to each replica, by its owner as in a checkpoint, and no rank ever gathers a full tensor for it. A replica
switches to the new weights between two batches, once it has received all of them and every rank has committed. The wire format is a line of
JSON and raw bytes; nothing is pickled. Beyond loopback both ends prove that they share a token, and every message is authenticated
(`weft.world.guard`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.errors import RunError, UsageError
from weft.run.state.checkpoint.piece import DTYPE_NAMES, Piece
from weft.world.current import token
from weft.world.guard import TOKEN, checked, reach
from weft.world.world import Group

WAIT_S = 120.0
Address = tuple[str, int]


def send_pieces(pieces: Sequence[Piece], to: Sequence[Address], everyone: Group, version: int) -> int:
    """Send the parameters and buffers that this rank owns to every replica; all ranks call it. Returns the bytes sent by this rank.

    Raises:
        RunError: a replica does not answer, or has another model; then all replicas keep their old weights.
    """
    owned_shards = [p for p in pieces if p.owner and p.kind in ("parameter", "buffer")]
    problem, sent, connections = "", 0, list[socket.socket]()
    try:
        for host, port in to:
            connection = _connected(host, port)
            connections.append(connection)
            _line(connection, {"version": version, "rank": everyone.index, "ranks": everyone.size, "pieces": len(owned_shards)})
            for shard in owned_shards:
                sent += _send(connection, shard)
            problem = problem or _answer(connection)
    except UsageError as error:
        problem = str(error)
    except (OSError, RunError) as error:
        problem = f"no replica answers at {host}:{port}: {error}"
    failed = torch.tensor([float(bool(problem))], dtype=torch.float64, device=pieces[0].tensor.device if pieces else "cpu")
    everyone.all_reduce(failed)
    commit = not failed.item()
    for connection in connections:
        try:
            _line(connection, {"commit": commit})
            if commit:
                problem = problem or _answer(connection)
        except OSError as error:
            problem = problem or f"a replica failed while it switched to version {version}: {error}"
        connection.close()
    if problem or not commit:
        reason = problem or "another rank could not send its shards"
        raise RunError(f"version {version} was not published: {reason}; the server keeps what it has")
    return sent


def _connected(host: str, port: int) -> socket.socket:
    """Connect to a replica; beyond loopback both ends prove that they share a token."""
    if not host.startswith("127."):
        if not (secret := token()):
            raise UsageError(f"a replica at {host} takes weights of those that have its {TOKEN}; set it on all ranks and nodes alike")
        host, port = "127.0.0.1", reach(host, port, checked(secret), WAIT_S)
    return socket.create_connection((host, port), WAIT_S)


def _send(connection: socket.socket, piece: Piece) -> int:
    data = piece.tensor.detach().cpu().contiguous()
    raw = _bytes(data)
    _line(
        connection,
        {
            "name": piece.name, "shape": list(piece.global_shape), "dtype": DTYPE_NAMES[data.dtype], "offsets": list(piece.offsets),
            "block": list(piece.tensor.shape if piece.block is None else piece.block), "flat": piece.flat, "bytes": len(raw),
        },
    )  # fmt: skip
    connection.sendall(raw)
    return len(raw)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _line(connection: socket.socket, values: dict[str, object]) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _answer(connection: socket.socket) -> str:
    """Return the error that a replica reports; empty if it accepted."""
    connection.settimeout(WAIT_S)
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(65536)
        if not data:
            return "a replica closed the connection"
        line += data
    return str(json.loads(line).get("error", ""))
