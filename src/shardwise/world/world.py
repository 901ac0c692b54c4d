"""The ranks of one run as seen by one rank. In: the rendezvous store. Out: `World`, created once per process and passed on.

Every key in the store has the run's generation as prefix, so that ranks of a new attempt never read a failed attempt's addresses.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise import errors
from shardwise.errors import RunError, ShardwiseError, UsageError
from shardwise.world import private
from shardwise.world.comm import mpi
from shardwise.world.comm.connection import Connection
from shardwise.world.comm.group import SHARED, Group, RanksByHost
from shardwise.world.comm.pending import CollectiveWork, LostPeer, is_peer_loss, synchronize_device
from shardwise.world.loader_positions import LoaderPositions
from shardwise.world.persistent_memory import PersistentMemory
from shardwise.world.recorder import RUNNING, CollectiveRecorder, WorkPace
from shardwise.world.shared_memory import library, segment
from shardwise.world.shared_memory.native import NativeChannel
from shardwise.world.shared_memory.setup import SharedMemory
from shardwise.world.terminal import STOP_SIGNALS

TRANSPORT = "SHARDWISE_TRANSPORT"  # the environment variable, which launchers pass on
ASK_S = 0.5  # interval at which a wait in a store checks for failed or ended ranks
LOOK_S = 0.05
CHECK_S = 0.001
REGROUP_S = 10.0  # for the launcher to announce that it replaces a failed rank
TRANSPORTS = ("", "gloo", SHARED, mpi.MPI)

__all__ = ["CollectiveWork", "Group", "LostPeer", "World"]


@dataclass(frozen=True, slots=True)
class RecoveryContext:
    """Recovery context of a surviving or replaced rank: persistent memory, the result of `prepare`, and a function that creates the world
    of a generation."""

    memory: PersistentMemory
    prepared: Any
    make_world: Callable[[int], World] | None  # None: failed ranks are not replaced


class Rendezvous(Protocol):
    """Rendezvous of ranks with an external launcher, also after a rank has failed (`world/launch/join`)."""

    @property
    def reconnect(self) -> Callable[[], Any]:
        """Function that opens another connection to the store."""
        ...

    def listen(self) -> socket.socket:
        """Return a socket on which this rank can serve the others."""
        ...

    def make_world(self, rank: int, num_ranks: int, store: Any, **options: Any) -> World:
        """Return the world of ranks that share `store`."""
        ...

    def reconvene(
        self, rank_and_count: tuple[int, int], endpoint: tuple[socket.socket | None, str, int], wait_s: float, **options: Any
    ) -> World:
        """Return the world of the surviving ranks."""
        ...


def pick_device(name: str, local_rank: int) -> torch.device:
    """Return the device of one rank for `cpu`, `cuda` or `auto`; ranks share GPUs round-robin. Raises UsageError without a GPU."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name not in ("cuda", "auto"):
        raise UsageError(f"device {name!r} is not cpu, cuda or auto")
    if not torch.cuda.is_available():
        raise UsageError("device cuda, but torch sees no GPU here; use device=cpu, or check the driver with nvidia-smi")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class World:
    """`num_ranks` processes, of which this is `rank`.

    `store` is the rendezvous store (None for one rank); `host` the address that gloo connects over; `timeout_s` the time limit of a
    collective. `threads` is the number of each rank's compute threads; without `may_add_threads` it is never raised. With
    `catch_sigterm` the first access to `stopping` makes SIGTERM set it; before that, and otherwise, SIGTERM ends the process. `transport`
    is that of tensors on the host: gloo; shared_memory for every group whose members share a host; empty for shared memory if all ranks
    share one; mpi for MPI, if mpirun or srun started the ranks; boxes=2 (or boxes=2,3) for gloo, with simulated hosts of so many
    neighbouring ranks. Without a C compiler gloo takes the place of shared memory. With both at once a rank that waits in gloo makes no
    progress for those that wait for it in shared memory, so collectives that mix them run in a thread of their own. `open_transport`
    opens (transport, its kind) of a group in place of these: ranks that are threads of one process have one of their own.

    >>> world = World()
    >>> world.group((0,)).all_reduce(torch.ones(2)).wait()
    """

    def __init__(  # noqa: PLR0913
        self,
        rank: int = 0,
        num_ranks: int = 1,
        store: Any = None,
        *,
        local_rank: int | None = None,
        device: torch.device | None = None,
        generation: int = 0,
        threads: int = 1,
        recorder: CollectiveRecorder | None = None,
        host: str = "127.0.0.1",
        timeout_s: float = 900.0,
        catch_sigterm: bool = False,
        transport: str = "",
        may_add_threads: bool = True,
        open_transport: Callable[[tuple[int, ...], Connection], tuple[Any, str]] | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise UsageError(f"rank {rank} is not one of {num_ranks} ranks")
        if num_ranks > 1 and store is None:
            raise UsageError(f"{num_ranks} ranks need a store to connect; start them by shardwise.launch, torchrun or srun")
        self.rank = rank
        self.num_ranks = num_ranks
        self.local_rank = rank if local_rank is None else local_rank
        self.device = device or torch.device("cpu")
        self.generation = generation
        self.threads = threads
        self.may_add_threads = may_add_threads
        self.recorder = recorder or CollectiveRecorder(generation=generation)
        self.pace = WorkPace(self.recorder)
        self.recovery: RecoveryContext | None = None
        self.rendezvous: Rendezvous | None = None  # if an external launcher started the ranks
        self.loader_positions, self.has_launch_settings = LoaderPositions(), False
        self.torch_ranks: tuple[int, ...] = ()  # of torch's default process group, if this world has initialized it
        self.names_waits, self.store_wait_since_s, self.store_wait_rank = False, 0.0, 0  # for `world/launch/wait_notices`
        self.failure_reason = ""  # why this world has failed
        self.previous_recorders: tuple[
            CollectiveRecorder, ...
        ] = ()  # of this rank's previous worlds: a signal may have reached one of them
        self._open_transport = open_transport or self._open
        self._store = private.prefix_store(f"gen{generation}", store) if store is not None and open_transport is None else store
        self._host = host
        self._timeout_s = timeout_s
        self._catch_sigterm = catch_sigterm
        self._host_sizes = _parse_host_sizes(transport, num_ranks)
        if transport not in TRANSPORTS and not self._host_sizes:
            raise UsageError(f"transport {transport!r} is not one of {', '.join(TRANSPORTS[1:])} or boxes=N")
        self._transport = "gloo" if self._host_sizes else transport
        if transport == mpi.MPI:
            mpi.check_started(rank, num_ranks)
        self._shared: SharedMemory | None = None
        self._is_single_host: bool | None = None
        self._num_exchanges = 0
        self._groups: dict[tuple[int, ...], Group] = {}
        if self._store is not None and self.device.type == "cuda":
            self._store.set(f"place/{rank}", _gpu_location(self.device))
        elif self._store is not None and transport == "":
            self._store.set(f"host/{rank}", segment.host_identity())

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, num_ranks={self.num_ranks}, device={self.device}, generation={self.generation})"

    @property
    def world_group(self) -> Group:
        """The group of all ranks."""
        return self.group(tuple(range(self.num_ranks)))

    @property
    def stopping(self) -> bool:
        """True if the run was asked to stop (SIGTERM, Ctrl-C, the end of a terminal, SIGUSR1): save, then return.

        Ranks may see it at different times: agree before acting on it, `world.all_reduce_max([world.stopping])`.
        """
        if self._catch_sigterm:
            self._catch_sigterm = False
            for number in (signal.SIGTERM, *(n for n in STOP_SIGNALS if signal.getsignal(n) == signal.SIG_DFL)):
                signal.signal(number, lambda number, frame: self.recorder.request_stop())
        return self.recorder.stopping or any(recorder.stopping for recorder in self.previous_recorders)

    def next_generation(self, error: BaseException) -> World:
        """Return the world of the next generation, after `error` has ended this rank's current step; this world is closed.

        Raises `error` if it is no peer loss, or failed ranks are not replaced.
        """
        if self.recovery is None or self.recovery.make_world is None or not self.is_peer_loss(error):
            raise error
        self.close()
        deadline = time.monotonic() + REGROUP_S
        while not self._has_failed:
            if time.monotonic() > deadline:
                raise error
            time.sleep(1e-3)
        world = self.recovery.make_world(self.recorder.target_generation)
        world.recovery = self.recovery
        world.recorder.set_phase(RUNNING)
        return world

    def is_peer_loss(self, error: BaseException) -> bool:
        """Return whether `error` is a peer loss, or came after one."""
        return is_peer_loss(error) or self._has_failed

    @property
    def _has_failed(self) -> bool:
        """True if a rank of this world has failed, and the world with it."""
        return bool(self.failure_reason) or self.recorder.target_generation != self.generation

    def abandon(self, why: str) -> None:
        """Mark this world as failed, `why`; its waits, in any thread, raise a LostPeer. Called by a monitoring thread."""
        self.failure_reason = why
        for group in tuple(self._groups.values()):
            group.abandon()

    def abandon_if_failed(self) -> bool:
        """Call `abandon` if the launcher has announced a failed rank; return whether it has."""
        if self._has_failed and not self.failure_reason:
            self.abandon("another rank has failed")
        return self._has_failed

    def close(self) -> None:
        """Close all connections, which aborts the waits of ranks that wait for this one."""
        for group in self._groups.values():
            group.close()

    def _wait_for_key(self, key: str, store: Any = None) -> bytes:
        """Return a store's value of `key`, once it is there. Raises LostPeer if a rank fails meanwhile."""
        store = self._store if store is None else store
        deadline = time.monotonic() + self._timeout_s
        with self._waiting_in_store(int(digits) if (digits := key.rpartition("/")[2]).isdecimal() else 0):
            while not self._has_key(store, key, ASK_S, key):
                if time.monotonic() > deadline:
                    raise LostPeer(f"Timed out after {self._timeout_s:g} s: no rank has set {key}, for which rank {self.rank} waits")
        return bytes(store.get(key))

    @contextmanager
    def _waiting_in_store(self, rank: int) -> Iterator[None]:
        self.store_wait_since_s, self.store_wait_rank = time.monotonic(), min(rank, self.num_ranks - 1)
        try:
            yield
        finally:
            self.store_wait_since_s = 0.0

    def name_waits(self) -> None:
        """Name ranks that others wait for, from now on: a plain loop has begun."""
        self.names_waits = True
        self.recorder.name_waits()

    def write_heartbeat(self) -> None:
        """Write a heartbeat for the launcher; a thread of the rank does so automatically."""
        self.recorder.write_heartbeat()

    def synchronize(self) -> None:
        """Return when this rank's device has finished its work; at once on CPUs."""
        synchronize_device(self.device)

    def group(self, ranks: Sequence[int]) -> Group:
        """Return the group of `ranks`, in their order; the same object every time. Only members call it.

        Raises UsageError if this rank is not a member.
        """
        key = tuple(ranks)
        group = self._groups.get(key)
        if group is None:
            if self.rank not in key or len(set(key)) != len(key) or not all(0 <= rank < self.num_ranks for rank in key):
                raise UsageError(f"rank {self.rank} of {self.num_ranks} cannot join the group of ranks {list(key)}")
            group = self._groups[key] = Group(key, self.rank, self.recorder, self.device, self._open_transport, self.ranks_by_host)
        return group

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of `values`, equally many on all ranks: a vote, a broadcast and a barrier at once."""
        if self.num_ranks == 1:
            return list(values)
        numbers = torch.tensor([int(value) for value in values], dtype=torch.int64, device=self.device)
        self.world_group.all_reduce(numbers, op="max")
        return [int(value) for value in numbers.tolist()]

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values of all ranks, none below 0, in their order; every rank calls it with equally many."""
        own, zeros = list(values), [0] * len(values)
        ranks = range(self.num_ranks)
        gathered = self.all_reduce_max([n for rank in ranks for n in (own if rank == self.rank else zeros)])
        return [gathered[rank * len(own) : (rank + 1) * len(own)] for rank in ranks]

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, in their order; every rank calls it."""
        if self._store is None:
            return [text]
        self._num_exchanges += 1
        name = f"gathered/{self._num_exchanges}"
        self._store.set(f"{name}/{self.rank}", text)
        return [self._wait_for_key(f"{name}/{rank}").decode() for rank in range(self.num_ranks)]

    def open_substore(self, name: str) -> Any:
        """Return a part of the ranks' store, for another library."""
        return private.prefix_store(name, self._store)

    def set_flag(self, what: str) -> None:
        """Set a flag that all ranks can read."""
        if self._store is not None:
            self._store.set(f"word/{what}", "")

    def wait_for_flag(self, what: str, wait_s: float) -> bool:
        """Return whether any rank has set a flag, after at most `wait_s`. Raises LostPeer if a rank fails meanwhile."""
        if self._store is None:
            return True
        deadline = time.monotonic() + wait_s
        while not self._store.check([f"word/{what}"]):  # a store's own wait prints a message when it times out
            if self._has_failed:
                raise LostPeer(f"rank {self.rank} waits, and another rank has failed")
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def transport_of(self, sizes: Sequence[int]) -> str:
        """Return the `transport` argument of a world whose (simulated) hosts have these sizes."""
        return f"boxes={','.join(map(str, sizes))}" if self._host_sizes else self._transport

    def first_ranks(self, num_ranks: int) -> World:
        """Return the world of the first `num_ranks` ranks, which include this one; the others are not in it."""
        if num_ranks == self.num_ranks:
            return self
        assert self.rendezvous is not None
        assert self._store is not None
        transport = (
            self.transport_of([len(box) for box in self.ranks_by_host(tuple(range(num_ranks)))]) if self._host_sizes else self._transport
        )
        return self.rendezvous.make_world(
            self.rank, num_ranks, private.prefix_store("first", self._store), local_rank=self.local_rank, device=self.device,
            generation=self.generation, transport=transport,
        )  # fmt: skip

    def side_world(self, name: str) -> World:
        """Return a world of the same ranks with separate gloo connections, for communication during training."""
        assert self.rendezvous is not None
        assert self._store is not None
        return self.rendezvous.make_world(
            self.rank, self.num_ranks, private.prefix_store(name, self._store), local_rank=self.local_rank, device=torch.device("cpu"),
            generation=self.generation, transport="gloo",
        )  # fmt: skip

    def broadcast_text(self, make: Callable[[], str]) -> str:
        """Broadcast the text that `make_world` returns on rank 0; the others do not call it, and wait for at most a collective's time
        limit.

        Raises what rank 0 raised, on every rank; RunError if rank 0 does not answer in time.
        """
        if self._store is None:
            return make()
        self._num_exchanges += 1
        key = f"told/{self._num_exchanges}"
        if self.rank == 0:
            try:
                text = make()
            except ShardwiseError as error:
                self._store.set(key, json.dumps([type(error).__name__, str(error)]))
                raise
            self._store.set(key, json.dumps(["", text]))
            return text
        deadline, what = time.monotonic() + self._timeout_s, "what rank 0 chooses"
        with self._waiting_in_store(0):
            while not self._has_key(self._store, key, min(ASK_S, deadline - time.monotonic()), what):
                if self.recorder.has_ended(0) and not self._has_key(
                    self._store, key, 0.0, what
                ):  # it may have answered, and returned, since
                    raise LostPeer(f"rank {self.rank} waits for {what}, and rank 0 has ended")
                if time.monotonic() >= deadline:
                    raise RunError(f"rank {self.rank} waited {self._timeout_s:.0f} s for {what}; did rank 0 end?")
        kind, text = json.loads(self._store.get(key))
        if kind:
            raise getattr(errors, kind, RunError)(text)
        return str(text)

    def _has_key(self, store: Any, key: str, wait_s: float, what: str) -> bool:
        """Return whether a store has `key`, after at most `wait_s`. Raises LostPeer if a rank or the store fails during the wait."""
        deadline, pause_s = time.monotonic() + wait_s, CHECK_S
        try:  # a store's own wait prints a warning of torch's when it times out
            while not store.check([key]):
                if self._has_failed:
                    raise LostPeer(f"rank {self.rank} waits for {what}, and another rank has failed")
                if time.monotonic() >= deadline:
                    return False
                time.sleep(pause_s)
                pause_s = CHECK_S if self.rendezvous is None else min(2 * pause_s, LOOK_S)  # a file on this host is cheap to poll
        except dist.DistNetworkError as error:
            raise LostPeer(f"rank {self.rank} waits for {what}, and lost the store: {error}; did rank 0 end?") from error
        return True

    def _open(self, ranks: tuple[int, ...], connection: Connection) -> tuple[Any, str]:
        """Open (transport, its kind): NCCL needs a GPU of its own for every member, shared memory one host for all."""
        assert self._store is not None
        if self._has_failed:
            raise LostPeer(f"rank {self.rank} connects with ranks {list(ranks)}, and another rank has failed: {self.failure_reason}")
        index = ranks.index(self.rank)
        name = "group/" + ",".join(map(str, ranks)) + str(connection)
        if self._transport == mpi.MPI:
            return mpi.MpiChannel(ranks, name, self._timeout_s), mpi.MPI
        if self.device.type == "cuda" and dist.is_nccl_available():
            gpus = {self._wait_for_key(f"place/{rank}") for rank in ranks}
            if len(gpus) == len(ranks):
                if connection.direction is not None:
                    index, ranks = int(index == connection.direction[1]), connection.direction
                return private.nccl_process_group(private.prefix_store(name, self._store), index, len(ranks), self._timeout_s), "nccl"
        if self.device.type == "cpu" and (self._transport != "gloo" or (self._host_sizes and connection.is_intra_host)):
            channel = self._open_shared_memory(
                LossAwareStore(self, private.prefix_store(f"{name}/memory", self._store)), index, ranks, connection
            )
            if not isinstance(channel, str):
                return channel, SHARED
            if self.local_rank == 0 and channel.startswith(library.UNAVAILABLE):
                _report_once(f"shardwise: {channel}; ranks of this host communicate over gloo, slower. For shared memory {library.REMEDY}")
        return private.gloo_process_group(private.prefix_store(name, self._store), index, len(ranks), self._timeout_s, self._host), "gloo"

    def ranks_by_host(self, ranks: tuple[int, ...]) -> RanksByHost:
        """Return `ranks` by host, in the order in which hosts first appear."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._host_of(rank), []).append(rank)
        return tuple(map(tuple, by_host.values()))

    def _host_of(self, rank: int) -> str:
        if self._host_sizes:
            return str(sum(rank >= end for end in accumulate(self._host_sizes)))
        if self.num_ranks == 1 or self._transport == SHARED:
            return ""
        assert self._store is not None
        if self.device.type == "cuda":
            return str(self._wait_for_key(f"place/{rank}").decode()).rpartition("/")[0]
        return str(rank) if self._transport in ("gloo", mpi.MPI) else str(self._wait_for_key(f"host/{rank}").decode())

    def _open_shared_memory(self, store: Any, index: int, ranks: tuple[int, ...], connection: Connection) -> NativeChannel | str:
        if connection.is_intra_host:
            return self._make_shared_memory().open(store, index, ranks)
        if self._is_single_host is None:
            assert self._store is not None
            self._is_single_host = (
                self._transport == SHARED or len({self._wait_for_key(f"host/{rank}") for rank in range(self.num_ranks)}) == 1
            )
        if not self._is_single_host:
            return "the ranks of this run are on several hosts"
        if not connection.is_primary:
            return self._make_shared_memory().open(store, index, ranks)
        if self._shared is None:
            self._shared = self._make_shared_memory()
        return self._shared.open(store, index, ranks)

    def _make_shared_memory(self) -> SharedMemory:
        """Create the shared-memory engine of one thread: each side connection has a thread, and so an engine, of its own."""
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return SharedMemory(self.num_ranks > num_cores, self._timeout_s)


@dataclass(frozen=True, slots=True)
class LossAwareStore:
    """A store whose waits fail when a rank of the world has failed."""

    world: World
    store: Any

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.world._wait_for_key(key, self.store)


def _parse_host_sizes(transport: str, num_ranks: int) -> tuple[int, ...]:
    """Return the sizes in `boxes=2` (all of one size) or `boxes=2,3,1`; none for other transports."""
    text = transport.removeprefix("boxes=")
    if text == transport:
        return ()
    sizes = tuple(int(word) for word in text.split(",") if word.isdecimal() and int(word) > 0)
    if len(sizes) == 1 and num_ranks % sizes[0] == 0:
        sizes *= num_ranks // sizes[0]
    if sum(sizes) != num_ranks or text.count(",") not in (0, len(sizes) - 1):
        raise UsageError(f"transport {transport!r} does not divide {num_ranks} ranks; write boxes=2, or the size of each, boxes=2,3")
    return sizes


@cache
def _report_once(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _gpu_location(device: torch.device) -> str:
    """Return the host and the physical GPU: two ranks with equal locations share a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', device.index)}"
