"""Weights to a server that runs, without a file. In: this rank's pieces, where replicas listen. Out: bytes sent.

Every element crosses once to each replica: of equal copies one rank sends, as one rank writes in a checkpoint, and no rank ever holds a
whole tensor for it. A replica turns to the new weights between two batches, once it has all of them and every rank has said so.
What is sent is a line of JSON and raw bytes; nothing is pickled. Beyond loopback both ends prove that they have one token, and every
message is authenticated (`weft.world.guard`).
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
    """Send the parameters and buffers that this rank owns to every replica; all ranks call it. Returns bytes of weights that this one sent.

    Raises:
        RunError: a replica that does not answer, or has another model: it keeps the weights that it has, and so do all.
    """
    mine = [p for p in pieces if p.owner and p.kind in ("parameter", "buffer")]
    trouble, sent, open_ones = "", 0, list[socket.socket]()
    try:
        for host, port in to:
            connection = _connected(host, port)
            open_ones.append(connection)
            _line(connection, {"version": version, "rank": everyone.index, "ranks": everyone.size, "pieces": len(mine)})
            for piece in mine:
                sent += _send(connection, piece)
            trouble = trouble or _answer(connection)
    except UsageError as error:
        trouble = str(error)
    except (OSError, RunError) as error:
        trouble = f"no replica answers at {host}:{port}: {error}"
    failed = torch.tensor([float(bool(trouble))], dtype=torch.float64, device=pieces[0].tensor.device if pieces else "cpu")
    everyone.all_reduce(failed)
    commit = not failed.item()
    for connection in open_ones:
        try:
            _line(connection, {"commit": commit})
            if commit:
                trouble = trouble or _answer(connection)
        except OSError as error:
            trouble = trouble or f"a replica went while it turned to version {version}: {error}"
        connection.close()
    if trouble or not commit:
        why = trouble or "another rank could not send its part"
        raise RunError(f"version {version} was not published: {why}; the server keeps what it has")
    return sent


def _connected(host: str, port: int) -> socket.socket:
    """To a replica; beyond loopback to one that proves that it has this rank's token, as this rank does."""
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
    """What a replica does not like, nothing where all is well."""
    connection.settimeout(WAIT_S)
    line = b""
    while not line.endswith(b"\n"):
        data = connection.recv(65536)
        if not data:
            return "a replica closed the connection"
        line += data
    return str(json.loads(line).get("error", ""))
