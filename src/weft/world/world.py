"""The ranks of one run as one rank sees them. In: a store in which they meet. Out: `World`, made once per process and passed on.

Every key in the store lies under the run's generation, so that ranks of a new attempt never read a dead attempt's addresses.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist

from weft import errors
from weft.errors import RunError, UsageError, WeftError
from weft.world import mpi, private
from weft.world.connection import Connection
from weft.world.group import SHARED, Boxes, Group
from weft.world.kept import Kept
from weft.world.pace import Pace
from weft.world.pending import LostPeer, Work, is_lost, synchronize
from weft.world.recorder import RUNNING, Recorder
from weft.world.shared_memory import segment
from weft.world.shared_memory.meet import Channel, SharedMemory
from weft.world.terminal import ASKING

TRANSPORT = "WEFT_TRANSPORT"  # the environment variable that whoever starts ranks passes on
ASK_S = 0.5  # after which who waits in a store looks whether a rank is lost, or has ended
LOOK_S = 0.05
CHECK_S = 0.001
REGROUP_S = 10.0  # until the launcher says that it replaces a lost rank
TRANSPORTS = ("", "gloo", SHARED, "portable", mpi.MPI)

__all__ = ["Group", "LostPeer", "Work", "World"]


@dataclass(frozen=True, slots=True)
class Survivor:
    """What a rank has that goes on after the loss of another, or in its place: memory that outlives it, what was prepared for it, and
    how to make the world of a generation."""

    memory: Kept
    prepared: Any
    make: Callable[[int], World] | None  # None: nobody replaces a rank


class Meeting(Protocol):
    """How ranks that something else started have met, and meet again after a loss (`world/join`)."""

    @property
    def again(self) -> Callable[[], Any]:
        """What connects to the store once more."""
        ...

    def listen(self) -> socket.socket:
        """Where a rank waits for the others."""
        ...

    def world(self, rank: int, num_ranks: int, store: Any, **options: Any) -> World:
        """The world of ranks that meet in `store`."""
        ...

    def meet(self, who: tuple[int, int], where: tuple[socket.socket | None, str, int], wait_s: float, **options: Any) -> World:
        """The world of those who are left."""
        ...


class World:
    """`num_ranks` processes, of which this is `rank`.

    `store` is where they meet (None for one rank); `host` the address that gloo connects over; `timeout_s` how long a collective may
    take before it fails by itself. `threads` is what each rank computes with; without `may_add_threads` never with more. With
    `catch_sigterm` the first look at `stopping` makes SIGTERM set it; before that, and otherwise, SIGTERM ends the process. `transport`
    is that of tensors on the host: gloo; shared_memory (or portable: without the C library) for every group whose members share a host;
    empty for shared memory where all ranks share one; mpi for MPI, where mpirun or srun started the ranks; boxes=2 (or boxes=2,3) for
    gloo, and boxes of so many neighbours as if each were a host. With both at once a rank that waits in gloo does nothing for those
    that wait for it in shared memory, so what mixes them does so in a thread of its own.

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
        recorder: Recorder | None = None,
        host: str = "127.0.0.1",
        timeout_s: float = 900.0,
        catch_sigterm: bool = False,
        transport: str = "",
        may_add_threads: bool = True,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise UsageError(f"rank {rank} is not one of {num_ranks} ranks")
        if num_ranks > 1 and store is None:
            raise UsageError(f"{num_ranks} ranks without a store cannot meet; start them by weft.launch, torchrun or srun")
        self.rank = rank
        self.num_ranks = num_ranks
        self.local_rank = rank if local_rank is None else local_rank
        self.device = device or torch.device("cpu")
        self.generation = generation
        self.threads = threads
        self.may_add_threads = may_add_threads
        self.recorder = recorder or Recorder(generation=generation)
        self.pace = Pace(self.recorder)
        self.survivor: Survivor | None = None
        self.joined: Meeting | None = None  # where something else started the ranks
        self.lost_why = ""  # why this world is over
        self.before: tuple[Recorder, ...] = ()  # of the worlds that this rank was in: a signal may have reached one of them
        self._store = private.prefixed(f"gen{generation}", store) if store is not None else None
        self._host = host
        self._timeout_s = timeout_s
        self._catch_sigterm = catch_sigterm
        self._boxes = _box_sizes(transport, num_ranks)
        if transport not in TRANSPORTS and not self._boxes:
            raise UsageError(f"transport {transport!r} is not one of {', '.join(TRANSPORTS[1:])} or boxes=N")
        self._transport = "gloo" if self._boxes else transport
        if transport == mpi.MPI:
            mpi.check_started(rank, num_ranks)
        self._shared: SharedMemory | None = None
        self._one_host: bool | None = None
        self._questions = 0
        self._groups: dict[tuple[int, ...], Group] = {}
        if self._store is not None and self.device.type == "cuda":
            self._store.set(f"place/{rank}", _place(self.device))
        elif self._store is not None and transport == "":
            self._store.set(f"host/{rank}", segment.host())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], device: str = "auto") -> World:
        """The world that torchrun or srun started this process in (`os.environ`), or a world of one rank.

        Raises UsageError for a variable that is missing or wrong, RunError for a port in use or an address that does not answer.
        """
        from weft.world.join import join

        return join(environment, device)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, num_ranks={self.num_ranks}, device={self.device}, generation={self.generation})"

    @property
    def everyone(self) -> Group:
        """The group of all ranks."""
        return self.group(tuple(range(self.num_ranks)))

    @property
    def stopping(self) -> bool:
        """Whether the run was told to stop (SIGTERM, Ctrl-C, the end of a terminal, SIGUSR1): save, then return.

        Ranks may see it at different times: agree before acting on it, `world.maximum([world.stopping])`.
        """
        if self._catch_sigterm:
            self._catch_sigterm = False
            for number in (signal.SIGTERM, *(n for n in ASKING if signal.getsignal(n) == signal.SIG_DFL)):
                signal.signal(number, lambda number, frame: self.recorder.stop())
        return self.recorder.stopping or any(recorder.stopping for recorder in self.before)

    def regrouped(self, error: BaseException) -> World:
        """The world of the next generation, after `error` has ended the step under way on this rank; this world is closed.

        Raises `error` where it is not the loss of a rank, or nobody replaces that one.
        """
        if self.survivor is None or self.survivor.make is None or not self.is_lost_in(error):
            raise error
        self.close()
        until = time.monotonic() + REGROUP_S
        while not self._is_over:
            if time.monotonic() > until:
                raise error
            time.sleep(1e-3)
        world = self.survivor.make(self.recorder.generation_now)
        world.survivor = self.survivor
        world.recorder.phase(RUNNING)
        return world

    def is_lost_in(self, error: BaseException) -> bool:
        """Whether `error` is the loss of another rank, or came after one."""
        return is_lost(error) or self._is_over

    @property
    def _is_over(self) -> bool:
        """Whether a rank was lost, and this world with it."""
        return bool(self.lost_why) or self.recorder.generation_now != self.generation

    def abandon(self, why: str) -> None:
        """This world is over, `why`; whoever waits in it, in any thread, gets a LostPeer. Called by a thread that watches."""
        self.lost_why = why
        for group in tuple(self._groups.values()):
            group.abandon()

    def abandon_lost(self) -> bool:
        """`abandon` where the launcher has said that a rank is lost. Returns whether it has."""
        if self._is_over and not self.lost_why:
            self.abandon("another rank is lost")
        return self._is_over

    def close(self) -> None:
        """Ends all connections: those that wait for this rank are told, and so leave theirs."""
        for group in self._groups.values():
            group.close()

    def _ask(self, key: str, store: Any = None) -> bytes:
        """What a store has under `key`, once it is there. Raises LostPeer where a rank is lost meanwhile."""
        store = self._store if store is None else store
        until = time.monotonic() + self._timeout_s
        while not self._answered(store, key, ASK_S, key):
            if time.monotonic() > until:
                raise LostPeer(f"Timed out after {self._timeout_s:g} s: nobody told rank {self.rank} {key}")
        return bytes(store.get(key))

    def beat(self) -> None:
        """Tells the launcher that this rank makes progress; a thread of the rank does so by itself."""
        self.recorder.beat()

    def synchronize(self) -> None:
        """Returns when this rank's device has done all that it was given; at once on processors."""
        synchronize(self.device)

    def group(self, ranks: Sequence[int]) -> Group:
        """The group of `ranks`, in their order; the same object every time. Only members may ask, and only members take part.

        Raises UsageError where this rank is not a member.
        """
        key = tuple(ranks)
        group = self._groups.get(key)
        if group is None:
            if self.rank not in key or len(set(key)) != len(key) or not all(0 <= rank < self.num_ranks for rank in key):
                raise UsageError(f"rank {self.rank} of {self.num_ranks} cannot join the group of ranks {list(key)}")
            group = self._groups[key] = Group(key, self.rank, self.recorder, self.device, self._open, self.boxes)
        return group

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum of `values` over all ranks, each of which gives as many: a vote, a broadcast and a barrier at once."""
        if self.num_ranks == 1:
            return list(values)
        numbers = torch.tensor([int(value) for value in values], dtype=torch.int64, device=self.device)
        self.everyone.all_reduce(numbers, op="max")
        return [int(value) for value in numbers.tolist()]

    def gathered_numbers(self, values: Sequence[int]) -> list[list[int]]:
        """The values of all ranks, none below 0, in their order; every rank calls it with as many."""
        mine, nothing = list(values), [0] * len(values)
        everyone = range(self.num_ranks)
        told = self.maximum([n for rank in everyone for n in (mine if rank == self.rank else nothing)])
        return [told[rank * len(mine) : (rank + 1) * len(mine)] for rank in everyone]

    def gathered(self, text: str) -> list[str]:
        """The texts of all ranks, in their order; every rank calls it."""
        if self._store is None:
            return [text]
        self._questions += 1
        name = f"gathered/{self._questions}"
        self._store.set(f"{name}/{self.rank}", text)
        return [self._ask(f"{name}/{rank}").decode() for rank in range(self.num_ranks)]

    def tell(self, what: str) -> None:
        """Every rank may know from now on."""
        if self._store is not None:
            self._store.set(f"word/{what}", "")

    def is_told(self, what: str, wait_s: float) -> bool:
        """Whether any rank has told, after at most `wait_s`. Raises LostPeer where a rank is lost meanwhile."""
        if self._store is None:
            return True
        until = time.monotonic() + wait_s
        while not self._store.check([f"word/{what}"]):  # a wait in the store that is out of time writes into the output
            if self._is_over:
                raise LostPeer(f"rank {self.rank} waits, and another rank is lost")
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True

    def transport_of(self, sizes: Sequence[int]) -> str:
        """That of a world whose boxes have these sizes."""
        return f"boxes={','.join(map(str, sizes))}" if self._boxes else self._transport

    def first(self, num_ranks: int) -> World:
        """The world of the first so many ranks, of which this is one; the others take no part."""
        if num_ranks == self.num_ranks:
            return self
        assert self.joined is not None
        assert self._store is not None
        transport = self.transport_of([len(box) for box in self.boxes(tuple(range(num_ranks)))]) if self._boxes else self._transport
        return self.joined.world(
            self.rank, num_ranks, private.prefixed("first", self._store), local_rank=self.local_rank, device=self.device,
            generation=self.generation, transport=transport,
        )  # fmt: skip

    def beside(self, name: str) -> World:
        """The same ranks with connections of their own, between hosts over gloo, for what goes on while they train."""
        assert self.joined is not None
        assert self._store is not None
        return self.joined.world(
            self.rank, self.num_ranks, private.prefixed(name, self._store), local_rank=self.local_rank, device=torch.device("cpu"),
            generation=self.generation, transport="gloo",
        )  # fmt: skip

    def told(self, make: Callable[[], str]) -> str:
        """What `make` returns on rank 0, on every rank; the others do not call it, and wait for as long as a collective may take.

        Raises what rank 0 raised, on every rank; RunError where rank 0 does not answer in time.
        """
        if self._store is None:
            return make()
        self._questions += 1
        key = f"told/{self._questions}"
        if self.rank == 0:
            try:
                text = make()
            except WeftError as error:
                self._store.set(key, json.dumps([type(error).__name__, str(error)]))
                raise
            self._store.set(key, json.dumps(["", text]))
            return text
        until, what = time.monotonic() + self._timeout_s, "what rank 0 chooses"
        while not self._answered(self._store, key, min(ASK_S, until - time.monotonic()), what):
            if self.recorder.ended(0) and not self._answered(self._store, key, 0.0, what):  # it may have answered, and returned, since
                raise LostPeer(f"rank {self.rank} waits for {what}, and rank 0 has ended")
            if time.monotonic() >= until:
                raise RunError(f"rank {self.rank} waited {self._timeout_s:.0f} s for {what}; did rank 0 end?")
        kind, text = json.loads(self._store.get(key))
        if kind:
            raise getattr(errors, kind, RunError)(text)
        return str(text)

    def _answered(self, store: Any, key: str, wait_s: float, what: str) -> bool:
        """Whether a store has `key`, after at most `wait_s`. Raises LostPeer where who waits for `what` loses a rank or the store."""
        if self.joined is None:  # a file of this host, into which looking costs little
            until = time.monotonic() + wait_s
            while not store.check([key]):
                if self._is_over:
                    raise LostPeer(f"rank {self.rank} waits for {what}, and another rank is lost")
                if time.monotonic() >= until:
                    return False
                time.sleep(CHECK_S)
            return True
        try:
            store.wait([key], timedelta(seconds=max(0.001, wait_s)))
        except dist.DistNetworkError as error:
            raise LostPeer(f"rank {self.rank} waits for {what}, and lost the store: {error}; did rank 0 end?") from error
        except RuntimeError as error:  # not there yet
            if self._is_over:
                raise LostPeer(f"rank {self.rank} waits for {what}, and another rank is lost") from error
            return False
        return True

    def _open(self, ranks: tuple[int, ...], connection: Connection) -> tuple[Any, str]:
        """(transport, its kind): NCCL needs a GPU of its own for every member, shared memory one host for all."""
        assert self._store is not None
        if self._is_over:
            raise LostPeer(f"rank {self.rank} connects with ranks {list(ranks)}, and another rank is lost: {self.lost_why}")
        index = ranks.index(self.rank)
        name = "group/" + ",".join(map(str, ranks)) + str(connection)
        if self._transport == mpi.MPI:
            return mpi.MpiChannel(ranks, name, self._timeout_s), mpi.MPI
        if self.device.type == "cuda" and dist.is_nccl_available():
            places = {self._ask(f"place/{rank}") for rank in ranks}
            if len(places) == len(ranks):
                if connection.direction is not None:
                    index, ranks = int(index == connection.direction[1]), connection.direction
                return private.nccl(private.prefixed(name, self._store), index, len(ranks), self._timeout_s), "nccl"
        if self.device.type == "cpu" and (self._transport != "gloo" or (self._boxes and connection.of_box)):
            channel = self._share(Asked(self, private.prefixed(f"{name}/memory", self._store)), index, ranks, connection)
            if not isinstance(channel, str):
                return channel, SHARED
        return private.gloo(private.prefixed(name, self._store), index, len(ranks), self._timeout_s, self._host), "gloo"

    def boxes(self, ranks: tuple[int, ...]) -> Boxes:
        """`ranks` by the host that they are on, in the order in which hosts come."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self._host_of(rank), []).append(rank)
        return tuple(map(tuple, by_host.values()))

    def _host_of(self, rank: int) -> str:
        if self._boxes:
            return str(sum(rank >= end for end in accumulate(self._boxes)))
        if self.num_ranks == 1 or self._transport in (SHARED, "portable"):
            return ""
        assert self._store is not None
        if self.device.type == "cuda":
            return str(self._ask(f"place/{rank}").decode()).rpartition("/")[0]
        return str(rank) if self._transport in ("gloo", mpi.MPI) else str(self._ask(f"host/{rank}").decode())

    def _share(self, store: Any, index: int, ranks: tuple[int, ...], connection: Connection) -> Channel | str:
        if connection.of_box:
            return self._engine().open(store, index, ranks)
        if self._one_host is None:
            assert self._store is not None
            self._one_host = (
                self._transport in (SHARED, "portable") or len({self._ask(f"host/{rank}") for rank in range(self.num_ranks)}) == 1
            )
        if not self._one_host:
            return "the ranks of this run are on several hosts"
        if not connection.is_primary:
            return self._engine().open(store, index, ranks)
        if self._shared is None:
            self._shared = self._engine()
        return self._shared.open(store, index, ranks)

    def _engine(self) -> SharedMemory:
        """What drives shared memory in one thread: a lane has a thread, and so an engine, of its own."""
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return SharedMemory(self.num_ranks > num_cores, self._timeout_s, native=self._transport != "portable")


@dataclass(frozen=True, slots=True)
class Asked:
    """A store in which who waits hears of a lost rank."""

    world: World
    store: Any

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.world._ask(key, self.store)


def _box_sizes(transport: str, num_ranks: int) -> tuple[int, ...]:
    """The sizes in `boxes=2` (all of one size) or `boxes=2,3,1`; none for other transports."""
    text = transport.removeprefix("boxes=")
    if text == transport:
        return ()
    sizes = tuple(int(word) for word in text.split(",") if word.isdecimal() and int(word) > 0)
    if len(sizes) == 1 and num_ranks % sizes[0] == 0:
        sizes *= num_ranks // sizes[0]
    if sum(sizes) != num_ranks or text.count(",") not in (0, len(sizes) - 1):
        raise UsageError(f"transport {transport!r} does not divide {num_ranks} ranks; write boxes=2, or the size of each, boxes=2,3")
    return sizes


def _place(device: torch.device) -> str:
    """The host and the physical GPU: two ranks with the same place share a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()}/{getattr(properties, 'uuid', device.index)}"
