"""Rendezvous of ranks that torchrun, mpirun or srun started, on one or many hosts. In: environment variables. Out: this process's World.

All ranks connect to a store at MASTER_ADDR:MASTER_PORT. torchrun's agent serves it; otherwise rank 0 does, on that address only.
Anyone who reaches the port can join, so beyond loopback rank 0 serves none without a secret. With SHARDWISE_TOKEN, a secret that all ranks
have, rank 0 serves a store that only they reach (`world/guard`); torchrun's store then holds only its address.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from shardwise.errors import RunError, UsageError
from shardwise.world import guard, matmul_backend, private
from shardwise.world.comm import mpi
from shardwise.world.launch.started import LAUNCHER_VARIABLE, as_torchrun, starting_process
from shardwise.world.launch.wait_notices import await_server, likely_cause, watch_waits
from shardwise.world.world import TRANSPORT, LostPeer, World, pick_device

RENDEZVOUS_TIMEOUT_S = 300.0
ORPHANED = 4  # the exit code of a worker whose agent has ended
LARGEST_PORT = 65535
StoreConnection = tuple[
    Any, partial[Any]
]  # a store, and the call that opens another connection to it, whose first arguments are its address


def join(environment: Mapping[str, str], device: str = "auto") -> World:
    """Return the world in which torchrun or srun started this process (`os.environ`), or a world of one rank.

    Raises:
        UsageError: a variable is missing or wrong.
        RunError: a port is in use, or an address does not answer.
    """
    env = as_torchrun(environment)
    if matmul_backend.PRODUCTS in env:
        matmul_backend.set_matmul_precision(env[matmul_backend.PRODUCTS])
    if "RANK" not in env:
        return World(device=pick_device(device, 0), threads=torch.get_num_threads())
    rank, num_ranks = _integer_variable(env, "RANK"), _integer_variable(env, "WORLD_SIZE")
    if not num_ranks:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE 0; a run has 1 rank or more")
    if rank >= num_ranks:
        raise UsageError(f"RANK is {rank} and WORLD_SIZE {num_ranks}; ranks count from 0 to {num_ranks - 1}")
    local_rank = _integer_variable(env, "LOCAL_RANK") if "LOCAL_RANK" in env else rank
    generation = _integer_variable(env, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in env else 0
    rank_device = pick_device(device, local_rank)
    if num_ranks == 1:
        return World(device=rank_device, generation=generation, threads=torch.get_num_threads())
    if env.get(TRANSPORT) == mpi.MPI:
        mpi.check_started(rank, num_ranks)
        mpi.abort_all_on_exception()
        listener, address, port = _endpoint_from_mpi(rank, num_ranks)
    else:
        listener, address, port = _endpoint_from_environment(env, rank)
    run = env.get("TORCHELASTIC_RUN_ID", env.get("SLURM_JOB_ID", ""))
    try:
        if listener is None and env.get(TRANSPORT) != mpi.MPI:
            await_server(address, port, rank, num_ranks, likely_cause(environment), RENDEZVOUS_TIMEOUT_S)
        store, reconnect = _open_store(env, (rank, num_ranks), (listener, address, port), f"shardwise/{run}/store{generation}")
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} of {num_ranks} cannot connect to {address}:{port}: {str(error).splitlines()[0]}; "
            "check MASTER_ADDR and MASTER_PORT, that rank 0 runs, and the firewall"
        ) from error
    for starter in (agent_of(os.getpid()), int(env.get(LAUNCHER_VARIABLE, "0"))):
        if starter:
            _exit_with_agent(starter)
    host = _host_address(env.get("GLOO_SOCKET_IFNAME", ""), address, port)
    prefix = f"shardwise/{run}"
    connect = partial(_reconnect_prefixed, reconnect, prefix)
    world = EnvironmentRendezvous(env, host, prefix, connect).make_world(
        rank, num_ranks, store, local_rank=local_rank, device=rank_device, generation=generation, transport=env.get(TRANSPORT, "")
    )
    watch_waits(world, connect, reconnect.args[:2], environment)
    return world


@dataclass(frozen=True, slots=True)
class EnvironmentRendezvous:
    """Rendezvous of ranks with an external launcher: at the start, and again after a rank has failed. `host`: this rank's address for
    its peers; `reconnect`: opens another connection to the current world's store."""

    env: Mapping[str, str]
    host: str
    prefix: str
    reconnect: Callable[[], Any]

    def make_world(self, rank: int, num_ranks: int, store: Any, **options: Any) -> World:
        """Return the world of ranks that share `store`."""
        world = World(
            rank,
            num_ranks,
            private.prefix_store(self.prefix, store),
            threads=torch.get_num_threads(),
            host=self.host,
            catch_sigterm=True,
            **options,
        )
        world.rendezvous = self
        return world

    def listen(self) -> socket.socket:
        """Return a socket on which this rank can serve the others."""
        return _listen_on(self.host, 0)

    def reconvene(
        self, rank_and_count: tuple[int, int], endpoint: tuple[socket.socket | None, str, int], wait_s: float, **options: Any
    ) -> World:
        """Return the world of the surviving ranks. `rank_and_count`, `endpoint`: as of `_open_store`.

        Raises RunError if the store cannot be reached, LostPeer if another rank does not connect.
        """
        rank, num_ranks = rank_and_count
        token = _token_of(self.env)
        try:
            store, reconnect = _serve_or_connect(token, num_ranks, endpoint, wait_s)
        except (RuntimeError, RunError) as error:
            raise RunError(
                f"rank {rank} of {num_ranks} surviving ranks is cut off from {endpoint[1]}:{endpoint[2]}: {str(error).splitlines()[0]}"
            ) from error
        prefix = f"shardwise/again{options['generation']}"
        rendezvous = replace(self, prefix=prefix, reconnect=partial(_reconnect_prefixed, reconnect, prefix))
        new_store = private.prefix_store(prefix, store)
        try:
            new_store.set(f"here/{rank}", "")
            new_store.wait([f"here/{peer}" for peer in range(num_ranks)], timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise LostPeer(f"not all of the {num_ranks} surviving ranks connected within {wait_s:g} s") from error
        return rendezvous.make_world(rank, num_ranks, store, **options)


def _reconnect_prefixed(connect: Callable[[], Any], prefix: str) -> Any:
    return private.prefix_store(prefix, connect())


def _open_store(
    env: Mapping[str, str], rank_and_count: tuple[int, int], endpoint: tuple[socket.socket | None, str, int], key: str
) -> StoreConnection:
    """Open the ranks' store. `rank_and_count`: this rank, number of ranks; `endpoint`: as of `_endpoint_from_environment`; `key`: of the
    entry in torchrun's store with the address of the ranks' own. Raises RuntimeError if it cannot be reached."""
    (rank, num_ranks), (listener, address, port) = rank_and_count, endpoint
    has_agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    token = _token_of(env)
    if not token:
        if rank == 0 and guard.TOKEN_VARIABLE not in env and not has_agent_store and not _is_loopback(address):
            raise UsageError(
                f"rank 0 would serve the ranks' store on {address}, port {port}, to whoever reaches it; set {guard.TOKEN_VARIABLE} to a "
                f"secret, "
                f"one for all ranks (openssl rand -hex 16), or, where nobody else reaches that port, to {guard.NO_TOKEN}"
            )
        if rank == 0 and has_agent_store:
            print(
                f"shardwise: torchrun's store listens on all interfaces, port {port}, without authentication: whoever reaches it can "
                f"disturb "
                f"the run; set {guard.TOKEN_VARIABLE} to a secret, one for all ranks (openssl rand -hex 16), or let nobody else reach "
                f"that port",
                file=sys.stderr,
            )
        return _serve_or_connect(b"", num_ranks, endpoint, RENDEZVOUS_TIMEOUT_S)
    if has_agent_store:
        agent_store = private.tcp_store(address, port, num_ranks, RENDEZVOUS_TIMEOUT_S, None)
        if rank == 0:
            address = "127.0.0.1" if _is_loopback(address) else _host_address(env.get("GLOO_SOCKET_IFNAME", ""), address, port)
            listener = _listen_on(address, 0)
            agent_store.set(key, f"{address} {listener.getsockname()[1]}")
        else:
            address, _, port_text = bytes(agent_store.get(key)).decode().partition(" ")
            port = int(port_text)
    return _serve_or_connect(token, num_ranks, (listener, address, port), RENDEZVOUS_TIMEOUT_S)


def _serve_or_connect(token: bytes, num_ranks: int, endpoint: tuple[socket.socket | None, str, int], wait_s: float) -> StoreConnection:
    """Return the store at an address, served by the rank that has the `listener`; with a token through an authenticated relay."""
    listener, address, port = endpoint
    store_listener = listener
    if token and listener is None:
        address, port = "127.0.0.1", guard.connect_relay(address, port, token, wait_s)
    elif token and listener is not None:
        store_listener = _listen_on("127.0.0.1", 0)
        address, port = "127.0.0.1", int(store_listener.getsockname()[1])
        guard.serve_relay(listener, token, port)
    store = private.tcp_store(address, port, num_ranks, wait_s, store_listener.detach() if store_listener is not None else None)
    return store, partial(private.tcp_store, address, port, num_ranks, wait_s, None)


def _token_of(env: Mapping[str, str]) -> bytes:
    """Return the secret that all ranks have; empty: none."""
    text = env.get(guard.TOKEN_VARIABLE, guard.NO_TOKEN)
    return b"" if text == guard.NO_TOKEN else guard.validate_token(text)


def _is_loopback(address: str) -> bool:
    return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]).startswith(("127.", "::1"))


def _endpoint_from_environment(env: Mapping[str, str], rank: int) -> tuple[socket.socket | None, str, int]:
    """Return (socket on which this rank serves the store, address, port) from MASTER_ADDR and MASTER_PORT."""
    if "MASTER_ADDR" not in env:
        raise UsageError(
            "MASTER_ADDR is missing: ranks started by hand need RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, those of mpirun on several "
            "hosts the last two, or SHARDWISE_TRANSPORT=mpi"
        )
    address, port = env["MASTER_ADDR"], _integer_variable(env, "MASTER_PORT")
    if not 0 < port <= LARGEST_PORT:  # 0 would be any free port, which the other ranks cannot know
        raise UsageError(f"MASTER_PORT is {port}; ports are 1 to {LARGEST_PORT}, so set one that is free on the host of rank 0")
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return _listen_on(address, port) if serves else None, address, port


def _endpoint_from_mpi(rank: int, num_ranks: int) -> tuple[socket.socket | None, str, int]:
    """Return the same for any free port of rank 0's host, which MPI broadcasts."""
    _, num_local = mpi.local_ranks()
    listener = _listen_on("127.0.0.1" if num_local == num_ranks else socket.gethostname(), 0) if rank == 0 else None
    address, port = mpi.broadcast_address(lambda: listener.getsockname()[:2] if listener is not None else ("", 0))
    return listener, address, port


def agent_of(pid: int) -> int:
    """Return the torchrun agent of a process: its nearest ancestor without the variables that an agent gives its workers; 0: none."""
    return starting_process(pid, "TORCHELASTIC_RUN_ID")


def _exit_with_agent(agent: int) -> None:
    """End this process when the agent ends, even by SIGKILL: else its workers would train and write alongside their replacements."""
    try:
        descriptor = os.pidfd_open(agent)
    except (OSError, AttributeError):
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        os._exit(ORPHANED)

    threading.Thread(target=wait, daemon=True, name="shardwise-agent").start()


def _integer_variable(env: Mapping[str, str], name: str) -> int:
    text = env.get(name)
    if text is None or not text.strip().isdecimal():
        raise UsageError(f"{name} is {'missing' if text is None else repr(text)}; torchrun, mpirun and srun set it to a whole number")
    return int(text)


def _listen_on(address: str, port: int) -> socket.socket:
    """Return a socket that listens on `address` only. Raises RunError for a port in use, UsageError for an unknown address."""
    try:
        family, kind, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"MASTER_ADDR {address} has no address: {error}; give the name or address of the host of rank 0") from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(socket_address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RunError(
            f"rank 0 cannot listen on {address}:{port}: {error.strerror}; set MASTER_PORT to a free port, or end what uses this one "
            f"(ss -ltnp 'sport = :{port}')"
        ) from error
    return listener


def _host_address(interface: str, address: str, port: int) -> str:
    """Return this host's address for its peers: of `interface` if one is given, else of the route to `address`."""
    if interface:
        return _interface_address(interface)
    family, kind, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(socket_address)  # sends nothing: the kernel only picks the route
        return str(probe.getsockname()[0])


def _interface_address(interface: str) -> str:
    import fcntl  # here: POSIX has it
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            raise UsageError(f"GLOO_SOCKET_IFNAME is {interface!r}, but this host has no such interface with an address") from error
    return socket.inet_ntoa(reply[20:24])
