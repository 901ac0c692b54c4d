"""Joining ranks that torchrun or srun started, on one machine or many. In: environment variables. Out: the World of this process.

All ranks meet at MASTER_ADDR:MASTER_PORT. Under torchrun its agent serves that store; otherwise rank 0 does, on that address only.
Not modelled: authentication. Whoever reaches the port can join, so the address must lie in a network that is trusted.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from weft.errors import RunError, UsageError
from weft.world import matmul_backend, private
from weft.world.prepared_rank import pick_device
from weft.world.world import TRANSPORT, World

MEET_S = 300.0
ORPHANED = 4  # the exit code of a worker whose agent is gone
LARGEST_PORT = 65535
SLURM_PORTS = (20000, 20000)  # first, count


def join(environment: Mapping[str, str], device: str) -> World:
    """The world of these variables; a world of one rank where there are none. See `World.from_environment`."""
    env = _from_slurm(environment) if "RANK" not in environment and "SLURM_PROCID" in environment else dict(environment)
    if matmul_backend.PRODUCTS in env:
        matmul_backend.apply(env[matmul_backend.PRODUCTS])
    if "RANK" not in env:
        return World(device=pick_device(device, 0), threads=torch.get_num_threads())
    rank, num_ranks = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if not num_ranks:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE 0; a run has 1 rank or more")
    if rank >= num_ranks:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {num_ranks}; ranks count from 0 to {num_ranks - 1}")
    local_rank = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    generation = _number(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0
    place = pick_device(device, local_rank)
    if num_ranks == 1:
        return World(device=place, generation=generation, threads=torch.get_num_threads())
    if "MASTER_ADDR" not in env:
        raise UsageError("MASTER_ADDR is missing: ranks started by hand need RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT")
    address, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT")
    if not 0 < port <= LARGEST_PORT:  # 0 would be any free port, which the other ranks cannot know
        raise UsageError(f"MASTER_PORT is {port}; ports are 1 to {LARGEST_PORT}, so set one that is free on the host of rank 0")
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = _listen(address, port) if serves else None
    try:
        store = private.tcp_store(address, port, num_ranks, MEET_S, listener.detach() if listener is not None else None)
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} of {num_ranks} found nobody at {address}:{port}: {str(error).splitlines()[0]}; "
            "check MASTER_ADDR and MASTER_PORT, that rank 0 runs, and the firewall"
        ) from error
    if agent := agent_of(os.getpid()):
        _end_with(agent)
    run = env.get("TORCHELASTIC_RUN_ID", env.get("SLURM_JOB_ID", ""))
    host = _host_address(env.get("GLOO_SOCKET_IFNAME", ""), address, port)
    return World(
        rank,
        num_ranks,
        private.prefixed(f"weft/{run}", store),
        local_rank=local_rank,
        device=place,
        generation=generation,
        threads=torch.get_num_threads(),
        host=host,
        catch_sigterm=True,
        transport=env.get(TRANSPORT, ""),
    )


def agent_of(pid: int) -> int:
    """The torchrun agent that started a process: its nearest ancestor without the variables that an agent gives its workers; 0: none."""
    try:
        worker = _given_by_agent(pid)
        while worker:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if not _given_by_agent(pid):
                return pid
    except (OSError, ValueError, IndexError):  # no /proc, or somebody else's process
        pass
    return 0


def _given_by_agent(pid: int) -> bool:
    return b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes()


def _end_with(agent: int) -> None:
    """This process ends when the agent does, even by SIGKILL: its workers would train on, and write beside those that replace them."""
    try:
        watched = os.pidfd_open(agent)
    except (OSError, AttributeError):
        return

    def wait() -> None:
        select.select([watched], [], [])
        os._exit(ORPHANED)

    threading.Thread(target=wait, daemon=True, name="weft-agent").start()


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("node[007-010,12],login1")
    'node007'
    """
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^\[,]*))?", nodes)
    if found is None:
        raise UsageError(f"the node list {nodes!r} names no host; set MASTER_ADDR to the host of rank 0")
    return found[1] + (found[2] or "") + (found[3] or "")


def _from_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """SLURM's variables under torchrun's names."""
    env = dict(environment)
    first, count = SLURM_PORTS
    names = {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_NTASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
        "TORCHELASTIC_RESTART_COUNT": "SLURM_RESTART_COUNT",
    }
    env |= {ours: env[theirs] for ours, theirs in names.items() if theirs in env}
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    if "MASTER_ADDR" not in env and nodes:
        env["MASTER_ADDR"] = first_host(nodes)
    # Jobs that share a node must not share a port.
    env.setdefault("MASTER_PORT", str(first + int(re.sub(r"\D", "", env.get("SLURM_JOB_ID", "")) or 0) % count))
    return env


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name)
    if text is None or not text.strip().isdecimal():
        raise UsageError(f"{name} is {'missing' if text is None else repr(text)}; torchrun and srun set it to a whole number")
    return int(text)


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on `address` and no other interface. Raises RunError for a port in use, UsageError for an unknown address."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"MASTER_ADDR {address} has no address: {error}; give the name or address of the host of rank 0") from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RunError(
            f"rank 0 cannot listen on {address}:{port}: {error.strerror}; set MASTER_PORT to a free port, or end what uses this one "
            f"(ss -ltnp 'sport = :{port}')"
        ) from error
    return listener


def _host_address(interface: str, address: str, port: int) -> str:
    """The address of this host that others reach it by: of `interface` where one is named, else of the way to `address`."""
    if interface:
        return _address_of(interface)
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing: the kernel only picks the way
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str:
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise UsageError(f"GLOO_SOCKET_IFNAME is {interface!r}, but this host has no such interface with an address") from error
    return socket.inet_ntoa(answer[20:24])
