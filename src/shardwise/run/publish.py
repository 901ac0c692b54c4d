"""Publish weights to running inference servers without a file. In: this rank's shards, addresses of replicas. Out: bytes sent.

Every element is sent once to each replica, by its owner as in a checkpoint, and no rank ever gathers a full tensor for it. A replica
switches to the new weights between two batches, once it has received all of them and every rank has committed. The wire format is a line of
JSON and raw bytes; nothing is pickled. With a token both ends prove that they share it, and every message is authenticated
(`shardwise.world.guard`); without one replicas are on loopback.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.errors import RunError, UsageError
from shardwise.run.checkpoint.state_shard import DTYPE_NAMES, StateShard
from shardwise.world.guard import TOKEN_VARIABLE, connect_authenticated, validate_token
from shardwise.world.launch.current import run_token
from shardwise.world.world import Group

TIMEOUT_S = 120.0
LONGEST_REPLY = 1 << 16  # bytes
_SAME_TOKEN = f"the server and all ranks must have the same {TOKEN_VARIABLE}, or none"
Address = tuple[str, int]


def publish_weights(shards: Sequence[StateShard], replicas: Sequence[Address], world_group: Group, version: int) -> int:
    """Send the parameters and buffers that this rank owns to every replica; all ranks call it. Returns the bytes sent by this rank.

    Raises:
        RunError: a replica does not answer, or has another model; then all replicas keep their old weights.
    """
    owned_shards = [p for p in shards if p.is_owner and p.kind in ("parameter", "buffer")]
    problem, sent, connections = "", 0, list[socket.socket]()
    try:
        for host, port in replicas:
            connection = _connect_to_replica(host, port)
            connections.append(connection)
            _send_json_line(
                connection, {"version": version, "rank": world_group.index, "ranks": world_group.size, "pieces": len(owned_shards)}
            )
            for shard in owned_shards:
                sent += _send_shard(connection, shard)
            problem = problem or _read_reply(connection)
    except UsageError as error:
        problem = str(error)
    except (OSError, RunError) as error:
        problem = f"no replica answers at {host}:{port}: {error}" + (f"; {_SAME_TOKEN}" if isinstance(error, ConnectionError) else "")
    failed = torch.tensor([float(bool(problem))], dtype=torch.float64, device=shards[0].tensor.device if shards else "cpu")
    world_group.all_reduce(failed)
    commit = not failed.item()
    for connection in connections:
        try:
            _send_json_line(connection, {"commit": commit})
            if commit:
                problem = problem or _read_reply(connection)
        except OSError as error:
            problem = problem or f"a replica failed while it switched to version {version}: {error}"
        connection.close()
    if problem or not commit:
        reason = problem or "another rank could not send its shards"
        raise RunError(f"version {version} was not published: {reason}; the server keeps what it has")
    return sent


def _connect_to_replica(host: str, port: int) -> socket.socket:
    """Connect to a replica. With a token both ends prove that they have it; without one it has to be on loopback."""
    if secret := run_token():
        return connect_authenticated(host, port, validate_token(secret))
    if not host.startswith("127."):
        raise UsageError(f"a replica at {host} takes weights of those that have its {TOKEN_VARIABLE}; set it on all ranks and nodes alike")
    return socket.create_connection((host, port), TIMEOUT_S)


def _send_shard(connection: socket.socket, shard: StateShard) -> int:
    data = shard.tensor.detach().cpu().contiguous()
    raw = _tensor_bytes(data)
    _send_json_line(
        connection,
        {
            "name": shard.name, "shape": list(shard.global_shape), "dtype": DTYPE_NAMES[data.dtype], "offsets": list(shard.offsets),
            "block": list(shard.tensor.shape if shard.block is None else shard.block), "flat": shard.flat, "bytes": len(raw),
        },
    )  # fmt: skip
    connection.sendall(raw)
    return len(raw)


def _tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _send_json_line(connection: socket.socket, values: dict[str, object]) -> None:
    connection.sendall(json.dumps(values).encode() + b"\n")


def _read_reply(connection: socket.socket) -> str:
    """Return the error that a replica reports; empty if it accepted."""
    connection.settimeout(TIMEOUT_S)
    line = b""
    while not line.endswith(b"\n") and len(line) < LONGEST_REPLY:
        data = connection.recv(65536)
        if not data:
            return f"a replica closed the connection; {_SAME_TOKEN}"
        line += data
    try:
        return str(json.loads(line)["error"])
    except (ValueError, KeyError, TypeError):  # a nonce
        return f"a replica's answer is none; {_SAME_TOKEN}"
