"""Ranks as threads of one process, of which one runs at a time, and their exchange of tensors of a finite field.

A rank runs until it waits for another one, so a proof is the same in every run. A collective is a `Meeting`: members leave their tensors
and go on; who waits for the result computes it. The groups and their collectives are those of every other run
(`world/comm/group`): only the transport is another, which also refuses members that meet in different collectives or sizes.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RunError
from shardwise.run.prove.degrees import CERTAINTY
from shardwise.run.prove.field_tensor import FieldTensor, degree_of, lift_constants
from shardwise.world.comm.connection import Connection
from shardwise.world.world import World


class RankStopped(BaseException):
    """The end of a rank's thread because another rank has failed."""


class RankScheduler:
    """Lets one rank run at a time: the next one that can go on, in order, whenever the running one waits."""

    def __init__(self, num_ranks: int) -> None:
        self._wakeups = [threading.Lock() for _ in range(num_ranks)]  # free where a rank may go on
        for wakeup in self._wakeups:
            wakeup.acquire()
        self._conditions: list[Callable[[], bool] | None] = [lambda: True] * num_ranks  # None: it has ended
        self._waits_for = [""] * num_ranks
        self.error: BaseException | None = None

    def wait_until(self, rank: int, condition: Callable[[], bool], waits_for: str) -> None:
        """Return when a condition holds, which other ranks bring about. Raises RunError if none of them can go on."""
        if condition():
            return
        self._conditions[rank], self._waits_for[rank] = condition, waits_for
        self._resume_next(rank)
        self._wakeups[rank].acquire()
        if self.error is not None:
            raise RankStopped

    def _resume_next(self, rank: int) -> None:
        n = len(self._conditions)
        for other in ((rank + k) % n for k in range(1, n + 1)):
            condition = self._conditions[other]
            if condition is not None and condition():
                self._wake(other)
                return
        waiting = [f"rank {i} for {self._waits_for[i]}" for i, condition in enumerate(self._conditions) if condition is not None]
        if waiting:
            self._end_all(RunError(f"ranks wait for one another: {', '.join(waiting[:4])}{' ...' if len(waiting) > 4 else ''}"))

    def _end_all(self, error: BaseException) -> None:
        self.error = self.error or error
        for rank in range(len(self._wakeups)):
            self._wake(rank)

    def _wake(self, rank: int) -> None:
        if self._wakeups[rank].locked():
            self._wakeups[rank].release()

    def run(self, run_rank: Callable[[int], None]) -> None:
        """Run every rank to its end. Raises the first error."""

        def run_thread(rank: int) -> None:
            self._wakeups[rank].acquire()
            try:
                if self.error is None:
                    run_rank(rank)
            except RankStopped:
                pass
            except BaseException as error:
                self._end_all(error)
            self._conditions[rank] = None
            if self.error is None:
                self._resume_next(rank)

        threads = [threading.Thread(target=run_thread, args=(rank,), daemon=True) for rank in range(len(self._wakeups))]
        for thread in threads:
            thread.start()
        self._wake(0)
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error


@dataclass
class Meeting:
    """One collective of a group: what each member left there, and the result."""

    what: str
    parts: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    num_done: int = 0


class Exchange:
    """All meetings and messages between the ranks of a proof."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self.scheduler = num_ranks, RankScheduler(num_ranks)
        self.meetings: dict[tuple[object, ...], Meeting] = {}
        self.messages: dict[tuple[object, ...], deque[Tensor]] = defaultdict(deque)
        self.texts: dict[str, bytes] = {}

    def run_ranks(self, run_rank: Callable[[int], None]) -> None:
        """Run every rank to its end, on threads of their own. Raises the first error."""
        self.scheduler = RankScheduler(self._num_ranks)
        self.scheduler.run(run_rank)


class PendingResult:
    """An operation that another rank must join before its result is there."""

    def __init__(self, channel: ThreadChannel, is_ready: Callable[[], bool], finish: Callable[[], None], what: str) -> None:
        self._channel, self._is_ready, self._finish, self._what, self._done = channel, is_ready, finish, what, False

    def wait(self) -> None:
        """Wait for the others and store the result."""
        if not self._done:
            self._channel.exchange_room.scheduler.wait_until(self._channel.rank, self._is_ready, self._what)
            with torch.no_grad():
                self._finish()
            self._done = True

    def is_completed(self) -> bool:
        return self._done or self._is_ready()


class ThreadChannel:
    """The transport of one member of a group, with the interface of `world.comm.process_group.ProcessGroup`."""

    def __init__(self, room: Exchange, name: str, ranks: tuple[int, ...], rank: int) -> None:
        self.exchange_room, self.rank = room, rank
        self._name, self._ranks, self._index = name, ranks, ranks.index(rank)
        self._num_meetings = 0

    def widens(self, dtype: torch.dtype) -> bool:
        return True

    def abandon(self) -> None:
        """Do nothing: an error ends all ranks."""

    def all_reduce(self, x: Tensor, op: str, wait: bool) -> PendingResult:
        def reduce_parts(parts: Sequence[Tensor]) -> Tensor:
            if op == "sum":
                return add_up(parts)
            total = parts[0]
            for part in parts[1:]:
                total = torch.maximum(total, part) if op == "max" else torch.minimum(total, part)
            return total

        return self._start_meeting(f"all-reduce ({op})", tuple(x.shape), x, reduce_parts, lambda total: copy_into(x, total))

    def broadcast(self, x: Tensor, source: int, wait: bool) -> PendingResult:
        return self._start_meeting(
            f"broadcast from {source}", tuple(x.shape), x, lambda parts: parts[source], lambda part: copy_into(x, part)
        )

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], wait: bool) -> PendingResult:
        return self._start_meeting("all-gather", (x.numel(),), x, join_flat, lambda joined: copy_into(out.view(-1), joined))

    def exchange(self, out: Tensor, x: Tensor, arriving: Sequence[int], sizes: Sequence[int], wait: bool) -> PendingResult:
        sent = torch.split(x.detach().clone(), list(sizes))
        return self._start_meeting(
            "all-to-all", (), sent, lambda parts: parts, lambda parts: copy_into(out, self._take_own(parts, arriving))
        )

    def _take_own(self, parts: Sequence[Sequence[Tensor]], arriving: Sequence[int]) -> Tensor:
        own = [part[self._index] for part in parts]
        if [x.numel() for x in own] != list(arriving):
            raise RunError(
                f"rank {self.rank} expects {list(arriving)} elements in an all-to-all of {self._name}, gets {[x.numel() for x in own]}"
            )
        return join_flat(own)

    def _start_meeting(
        self, what: str, shape: tuple[int, ...], part: Any, combine: Callable[[Sequence[Any]], Any], store: Callable[[Any], None]
    ) -> PendingResult:
        room, key = self.exchange_room, (self._name, self._num_meetings)
        self._num_meetings += 1
        kind = f"{what} of {list(shape)}"
        meeting = room.meetings.setdefault(key, Meeting(kind))
        if meeting.what != kind:
            raise RunError(f"ranks of {self._name} meet in different collectives: rank {self.rank} in {kind}, another in {meeting.what}")
        meeting.parts[self._index] = part.detach().clone() if isinstance(part, Tensor) else part

        def store_result() -> None:
            if meeting.result is None:
                meeting.result = combine([meeting.parts[i] for i in range(len(self._ranks))])
            store(meeting.result)
            meeting.num_done += 1
            if meeting.num_done == len(self._ranks):
                del room.meetings[key]

        return PendingResult(self, lambda: len(meeting.parts) == len(self._ranks), store_result, f"{what} of {self._name}")

    def send(self, x: Tensor, to: int, tag: int) -> PendingResult:
        self.exchange_room.messages[self._name, self._index, to, tag].append(x.detach().clone())
        return PendingResult(self, lambda: True, lambda: None, "")

    def receive(self, x: Tensor, source: int, tag: int) -> PendingResult:
        box = self.exchange_room.messages[self._name, source, self._index, tag]
        return PendingResult(
            self, lambda: bool(box), lambda: copy_into(x, box.popleft()), f"a message from rank {self._ranks[source]} (tag {tag})"
        )


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the members' tensors, in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    if isinstance(total, FieldTensor) and degree_of(total).is_joined:
        CERTAINTY.note_sums([(degree_of(part), lift_constants(part).a) for part in parts], total.a)
    return total


def join_flat(parts: Sequence[Tensor]) -> Tensor:
    """Return the members' elements, member after member."""
    return torch.cat([part.reshape(-1) for part in parts])


def copy_into(target: Tensor, source: Tensor) -> None:
    """Write a result into a member's tensor; raises RunError where one of the two is real and the other is not."""
    if isinstance(source, FieldTensor) and not isinstance(target, FieldTensor):
        raise RunError("a rank receives computed numbers in a tensor of constants")
    target.detach().copy_(lift_constants(source) if isinstance(target, FieldTensor) else source)


class _ThreadStore:
    """The rendezvous store of ranks in one process."""

    def __init__(self, room: Exchange, rank: int) -> None:
        self._room, self._rank = room, rank

    def set(self, key: str, value: Any) -> None:
        self._room.texts[key] = value if isinstance(value, bytes) else str(value).encode()

    def get(self, key: str) -> bytes:
        self._room.scheduler.wait_until(self._rank, lambda: key in self._room.texts, key)
        return self._room.texts[key]

    def check(self, keys: Sequence[str]) -> bool:
        self._room.scheduler.wait_until(self._rank, lambda: all(key in self._room.texts for key in keys), keys[0])
        return True


def thread_world(room: Exchange, rank: int, num_ranks: int) -> World:
    """Return the world of one rank of a proof."""

    def open_channel(ranks: tuple[int, ...], connection: Connection) -> tuple[Any, str]:
        return ThreadChannel(room, f"ranks {list(ranks)}{connection}", ranks, rank), "threads"

    return World(
        rank,
        num_ranks,
        _ThreadStore(room, rank) if num_ranks > 1 else None,
        open_transport=open_channel,
        transport="gloo" if num_ranks > 1 else "",
    )
