"""Discrete-event simulation of a collective's messages. In: a program of transfers, bytes of its values, links between ranks. Out: seconds,
and traffic.

A message is a sequence of values that one rank sends and another receives without other actions in between: they pass one link with one
latency. Every rank sends one message at a time and receives one at a time; between nodes the ranks of a node share its ports, too.
Messages are served in the order in which they become ready. Adding a received value blocks its rank. Not modelled: routes that
cross in a network, and shared memory.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Compute, Program, Recv, Send, Value


@dataclass(frozen=True, slots=True)
class Wire:
    """Link between two ranks: seconds until the first byte, seconds per byte, and the resources occupied by a message besides both ends.

    `message_s`: time for which a message occupies its ends however small it is.
    """

    latency_s: float
    byte_s: float
    shared: tuple[Hashable, ...] = ()
    message_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TimedMessage:
    """One message: its values, its start, and the arrival of its last byte."""

    source: int
    target: int
    values: tuple[Value, ...]
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of a collective. `sent_bytes` and `received_bytes` by rank."""

    seconds: float
    messages: tuple[TimedMessage, ...]
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        return sum(self.sent_bytes)

    @property
    def balance(self) -> float:
        """Bytes through the busiest rank over the mean of all ranks: 1 if all carry the same."""
        both = [a + b for a, b in zip(self.sent_bytes, self.received_bytes, strict=True)]
        return max(both) * len(both) / sum(both) if sum(both) else 1.0


@dataclass(frozen=True, slots=True)
class _MessageValues:
    """Values that go from one rank to another as one message."""

    source: int
    target: int
    values: tuple[Value, ...]


def deliver_messages(
    program: Program, size_bytes: Callable[[Value], float], wire: Callable[[int, int], Wire], add_byte_s: float = 0.0
) -> Traffic:
    """Simulate the program's transfers. `add_byte_s`: seconds of adding a received byte.

    >>> from shardwise.collectives import build
    >>> ring = build("all_reduce", "ring", 4)
    >>> deliver_messages(ring, lambda value: 0.25, lambda source, target: Wire(0.0, 1.0)).seconds
    1.5

    Raises:
        ProgramError: a compute, which a collective cannot have; or a receive without its send.
    """
    rows = _group_messages(program)
    at, clock = [0] * program.num_ranks, [0.0] * program.num_ranks
    arrived: dict[_MessageValues, deque[float]] = defaultdict(deque)
    free: dict[Hashable, float] = defaultdict(float)
    waiting: dict[_MessageValues, int] = {}
    last, sent, received = ([0.0] * program.num_ranks for _ in range(3))
    delivered: list[TimedMessage] = []
    events: list[tuple[float, int, _MessageValues]] = []
    count = 0

    def run(rank: int) -> None:
        """Advance `rank` until it waits."""
        nonlocal count
        while at[rank] < len(rows[rank]):
            batch, adds = rows[rank][at[rank]]
            if batch.source == rank:
                heapq.heappush(events, (clock[rank], count, batch))
                count += 1
            elif arrived[batch]:
                clock[rank] = max(clock[rank], arrived[batch].popleft())
                if adds and add_byte_s:
                    clock[rank] += add_byte_s * sum(map(size_bytes, batch.values))
                    last[rank] = clock[rank]
            else:
                waiting[batch] = rank
                return
            at[rank] += 1

    for rank in range(program.num_ranks):
        run(rank)
    while events:
        ready, number, batch = heapq.heappop(events)
        link = wire(batch.source, batch.target)
        busy = (("out", batch.source), ("in", batch.target), *link.shared)
        start = ready
        for key in busy:  # a loop: `max` over a generator took a tenth of a comparison's time
            if free[key] > start:
                start = free[key]
        if start > ready:
            heapq.heappush(events, (start, number, batch))
            continue
        size = sum(map(size_bytes, batch.values))
        sent_s = start + link.message_s + size * link.byte_s
        for key in busy:
            free[key] = sent_s
        delivered.append(TimedMessage(batch.source, batch.target, batch.values, start, sent_s + link.latency_s))
        sent[batch.source] += size
        received[batch.target] += size
        arrived[batch].append(sent_s + link.latency_s)
        if batch in waiting:
            run(waiting.pop(batch))
    for rank, row in enumerate(rows):
        for batch, _ in row[at[rank] :]:
            raise ProgramError(f"{program.name}: rank {rank} waits for {batch.values[0]} of rank {batch.source}, which never comes")
    return Traffic(max([m.ended_s for m in delivered] + last, default=0.0), tuple(delivered), tuple(sent), tuple(received))


def num_steps(program: Program) -> int:
    """Return the number of sequential messages, whatever their sizes, if every rank sends one and receives one at a time.

    >>> from shardwise.collectives import build
    >>> [num_steps(build("all_reduce", name, 8)) for name in ("ring", "recursive_doubling", "halving_doubling", "tree", "parameter_server")]
    [14, 3, 6, 6, 14]
    """
    return round(deliver_messages(program, lambda _: 0.0, lambda *_: Wire(0.0, 0.0, (), 1.0)).seconds)


def _group_messages(program: Program) -> list[list[tuple[_MessageValues, bool]]]:
    """Return [rank] -> its messages in order, each with whether it adds the received values."""
    sends: dict[tuple[int, int], list[tuple[int, Value]]] = defaultdict(list)
    receives: dict[tuple[int, int], list[tuple[int, Value]]] = defaultdict(list)
    for rank, row in enumerate(program.actions):
        for step, action in enumerate(row):
            if isinstance(action, Send):
                sends[rank, action.to].append((step, action.value))
            elif isinstance(action, Recv):
                receives[action.source, rank].append((step, action.value))
            else:
                what = "a compute" if isinstance(action, Compute) else "no transfer"
                raise ProgramError(f"{program.name}: rank {rank} step {step}: {action} is {what}; only transfers are timed here")
    by_step: list[dict[int, tuple[_MessageValues, bool]]] = [{} for _ in program.actions]
    for (source, target), sent in sends.items():
        received = receives.get((source, target), [])
        is_paired = [value for _, value in sent] == [value for _, value in received]
        groups: list[list[int]] = []
        for i in range(len(sent)):
            if is_paired and groups and sent[i][0] == sent[i - 1][0] + 1 and received[i][0] == received[i - 1][0] + 1:
                groups[-1].append(i)
            else:
                groups.append([i])
        for group in groups:
            batch = _MessageValues(source, target, tuple(sent[i][1] for i in group))
            by_step[source][sent[group[0]][0]] = batch, False
            if is_paired:
                step = received[group[0]][0]
                by_step[target][step] = batch, _is_added(program, target, step)
    for (source, target), received in receives.items():
        if [v for _, v in sends.get((source, target), [])] != [v for _, v in received]:
            for step, value in received:
                by_step[target][step] = _MessageValues(source, target, (value,)), _is_added(program, target, step)
    return [[row[step] for step in sorted(row)] for row in by_step]


def _is_added(program: Program, rank: int, step: int) -> bool:
    action = program.actions[rank][step]
    return isinstance(action, Recv) and action.add
