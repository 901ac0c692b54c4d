"""When a collective's messages arrive. In: a program of transfers, bytes of its values, links between ranks. Out: seconds, and traffic.

A message is what one rank sends and another receives without anything in between: its values follow one another on one link, after one
latency. Every rank sends one message at a time and receives one at a time; between nodes the ranks of a node share its ports, too.
Messages go in the order in which they could. A rank that adds what it received does nothing else meanwhile. Not modelled: routes that
cross in a network, and memory that several ranks share.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from weft.errors import ProgramError
from weft.plan.program import Compute, Program, Recv, Send, Value


@dataclass(frozen=True, slots=True)
class Wire:
    """Between two ranks: seconds until the first byte, seconds a byte, and what is busy while a message passes, besides both ends.

    `message_s`: for which a message keeps its ends busy however small it is.
    """

    latency_s: float
    byte_s: float
    shared: tuple[Hashable, ...] = ()
    message_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Message:
    """One message: its values, when it set out, and when its last byte arrived."""

    source: int
    target: int
    values: tuple[Value, ...]
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a collective moves. `sent_bytes` and `received_bytes` by rank."""

    seconds: float
    messages: tuple[Message, ...]
    sent_bytes: tuple[float, ...]
    received_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        return sum(self.sent_bytes)

    @property
    def balance(self) -> float:
        """Bytes through the busiest rank over those through the mean one: 1 where all carry the same."""
        both = [a + b for a, b in zip(self.sent_bytes, self.received_bytes, strict=True)]
        return max(both) * len(both) / sum(both) if sum(both) else 1.0


@dataclass(frozen=True, slots=True)
class _Batch:
    """Values that go from one rank to another as one message."""

    source: int
    target: int
    values: tuple[Value, ...]


def deliver(program: Program, size_bytes: Callable[[Value], float], wire: Callable[[int, int], Wire], add_byte_s: float = 0.0) -> Traffic:
    """Run the program's transfers. `add_byte_s`: seconds for which a rank adds a byte that it received.

    >>> from weft.collectives import build
    >>> ring = build("all_reduce", "ring", 4)
    >>> deliver(ring, lambda value: 0.25, lambda source, target: Wire(0.0, 1.0)).seconds
    1.5

    Raises:
        ProgramError: a compute, which a collective has none of; or a rank that waits for what nobody sends.
    """
    rows = _messages(program)
    at, clock = [0] * program.num_ranks, [0.0] * program.num_ranks
    arrived: dict[_Batch, deque[float]] = defaultdict(deque)
    free: dict[Hashable, float] = defaultdict(float)
    waiting: dict[_Batch, int] = {}
    last = [0.0] * program.num_ranks
    sent, received = [0.0] * program.num_ranks, [0.0] * program.num_ranks
    done: list[Message] = []
    events: list[tuple[float, int, _Batch]] = []
    count = 0

    def run(rank: int) -> None:
        """Move `rank` on until it waits."""
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
        passed = start + link.message_s + size * link.byte_s
        for key in busy:
            free[key] = passed
        done.append(Message(batch.source, batch.target, batch.values, start, passed + link.latency_s))
        sent[batch.source] += size
        received[batch.target] += size
        arrived[batch].append(passed + link.latency_s)
        if batch in waiting:
            run(waiting.pop(batch))
    for rank, row in enumerate(rows):
        if at[rank] < len(row):
            batch, _ = row[at[rank]]
            raise ProgramError(f"{program.name}: rank {rank} waits for {batch.values[0]} of rank {batch.source}, which never comes")
    return Traffic(max([m.ended_s for m in done] + last, default=0.0), tuple(done), tuple(sent), tuple(received))


def num_steps(program: Program) -> int:
    """Messages one after another, however large, where every rank sends one and receives one at a time.

    >>> from weft.collectives import build
    >>> [num_steps(build("all_reduce", name, 8)) for name in ("ring", "recursive_doubling", "halving_doubling", "tree", "parameter_server")]
    [14, 3, 6, 6, 14]
    """
    return round(deliver(program, lambda _: 0.0, lambda *_: Wire(0.0, 0.0, (), 1.0)).seconds)


def _messages(program: Program) -> list[list[tuple[_Batch, bool]]]:
    """[rank] -> the messages that it sends and receives, in order, and whether it adds what it receives."""
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
    placed: list[dict[int, tuple[_Batch, bool]]] = [{} for _ in program.actions]
    for (source, target), out in sends.items():
        into = receives.get((source, target), [])
        pairs_up = [value for _, value in out] == [value for _, value in into]
        groups: list[list[int]] = []
        for i in range(len(out)):
            if pairs_up and groups and out[i][0] == out[i - 1][0] + 1 and into[i][0] == into[i - 1][0] + 1:
                groups[-1].append(i)
            else:
                groups.append([i])
        for group in groups:
            batch = _Batch(source, target, tuple(out[i][1] for i in group))
            placed[source][out[group[0]][0]] = batch, False
            if pairs_up:
                step = into[group[0]][0]
                placed[target][step] = batch, _adds(program, target, step)
    for (source, target), into in receives.items():
        if [v for _, v in sends.get((source, target), [])] != [v for _, v in into]:
            for step, value in into:
                placed[target][step] = _Batch(source, target, (value,)), _adds(program, target, step)
    return [[row[step] for step in sorted(row)] for row in placed]


def _adds(program: Program, rank: int, step: int) -> bool:
    action = program.actions[rank][step]
    return isinstance(action, Recv) and action.add
