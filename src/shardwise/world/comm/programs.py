"""Lower a collective's `Program` for execution: per rank the messages that it sends and receives, and the dependencies of each.

In: a program of sends and receives, and the order of its values in memory. Out: a `Route` for every rank. Adjacent values that both ends
transfer consecutively are one message. A receive that adds uses a buffer of its own; consecutive sums into one place are added in the order
of the source ranks, including this rank: the same summands give the same bits on all ranks. A send's source must not change until its
receiver is ready; if waiting for that could deadlock (found by simulation), sends use copies. Not modelled: sizes, and time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import Action
from shardwise.plan.ir.program import Program, Recv, Send, Value


class SendStep(NamedTuple):
    """Send the values at places `first` to `last` (exclusive) to rank `peer`, as the pair's message `number`; `is_copied`: from a copy."""

    step: int
    peer: int
    first: int
    last: int
    number: int
    is_copied: bool


class ReceiveStep(NamedTuple):
    """Receive places `first` to `last` from rank `peer` in place, once the sends that began at steps `wait_for_sends` have ended."""

    step: int
    peer: int
    first: int
    last: int
    number: int
    wait_for_sends: tuple[int, ...]


class ReduceStep(NamedTuple):
    """Add the messages of ranks `peers`, in ascending order, with this rank's own values before the `own_position`-th."""

    step: int
    peers: tuple[int, ...]
    numbers: tuple[int, ...]
    first: int
    last: int
    own_position: int
    wait_for_sends: tuple[int, ...]


RouteStep = SendStep | ReceiveStep | ReduceStep


@dataclass(frozen=True)
class Route:
    """One rank's `steps` in order, of a program with `num_places` values in a row. `checksum`: checksum that identifies the program."""

    name: str
    rank: int
    num_places: int
    steps: tuple[RouteStep, ...]
    checksum: int


class _RouteMessage(NamedTuple):
    is_send: bool
    peer: int
    first: int
    last: int
    add: bool
    number: int
    partner_index: int  # index of the other end's message in its rank's row


def build_routes(program: Program, values: Sequence[Value], is_contiguous: bool = True) -> tuple[Route, ...]:
    """Return the route of every rank. `values`: every transferred value, in memory order; `is_contiguous`: they are adjacent in memory.

    >>> program = Program.parse("rank 0: chunk(0)>1 chunk(0)<1\\nrank 1: chunk(0)+<0 chunk(0)>0")
    >>> [step._fields[1] for step in build_routes(program, [Value("chunk", (0,))])[1].steps]  # a reduction and a send
    ['peers', 'peer']

    Raises:
        ProgramError: an action other than a transfer, a value that is not in `values`, a send without its receive.
    """
    rows = _merge_messages(program, {value: i for i, value in enumerate(values)}, is_contiguous)
    waits = [_write_conflicts(row) for row in rows]
    copied = not _runs_to_end(rows, waits)
    mark = zlib.crc32(f"{program.name}/{program.actions}".encode())
    return tuple(
        Route(program.name, rank, len(values), _route_steps(row, waits[rank], rank, copied), mark) for rank, row in enumerate(rows)
    )


def _match_sends(program: Program, place: Mapping[Value, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (rank, step) of every send -> (rank, step) of its receive."""
    sent: dict[tuple[int, int, Value], deque[int]] = defaultdict(deque)
    for rank, row in enumerate(program.actions):
        for step, action in enumerate(row):
            if not isinstance(action, (Send, Recv)):
                raise ProgramError(
                    f"{program.name}: rank {rank} step {step}: {action} is no transfer, and a collective has no other action"
                )
            if action.value not in place:
                raise ProgramError(f"{program.name}: rank {rank} step {step}: {action.value} is none of the values that are exchanged")
            if isinstance(action, Send):
                sent[rank, action.to, action.value].append(step)
    partner: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, row in enumerate(program.actions):
        for step, action in enumerate(row):
            if isinstance(action, Recv):
                waiting = sent[action.source, rank, action.value]
                if not waiting:
                    raise ProgramError(f"{program.name}: rank {rank} step {step}: {action} is never sent")
                partner[action.source, waiting.popleft()] = (rank, step)
    for (rank, to, value), steps in sent.items():
        if steps:
            raise ProgramError(f"{program.name}: rank {rank} step {steps[0]}: {Send(value, to)} is never received")
    return partner


def _sends_place(action: Action, at: int, place: Mapping[Value, int]) -> bool:
    """Return whether an action sends the value at place `at`."""
    return isinstance(action, Send) and place[action.value] == at


def _merge_messages(program: Program, place: dict[Value, int], joined: bool) -> list[list[_RouteMessage]]:
    """Return [rank] -> its messages in order."""
    partner = _match_sends(program, place)
    begun: list[dict[int, tuple[bool, int, int, int, bool, int, tuple[int, int]]]] = [{} for _ in program.actions]
    numbers: dict[tuple[int, int], int] = defaultdict(int)
    for rank, row in enumerate(program.actions):
        step = 0
        while step < len(row):
            action = row[step]
            if not isinstance(action, Send):
                step += 1
                continue
            to, at = partner[rank, step]
            target_row = program.actions[to]
            first = place[action.value]
            length = 1
            while joined and step + length < len(row) and at + length < len(target_row):
                if partner.get((rank, step + length)) != (to, at + length) or not _sends_place(row[step + length], first + length, place):
                    break
                if getattr(target_row[at + length], "add", False) != getattr(target_row[at], "add", False):
                    break
                length += 1
            add = getattr(target_row[at], "add", False)
            number = numbers[rank, to]
            numbers[rank, to] += 1
            begun[rank][step] = (True, to, first, first + length, add, number, (to, at))
            begun[to][at] = (False, rank, first, first + length, add, number, (rank, step))
            step += length
    position = [{step: i for i, step in enumerate(sorted(row))} for row in begun]
    return [[_RouteMessage(*row[step][:6], position[row[step][6][0]][row[step][6][1]]) for step in sorted(row)] for row in begun]


def _write_conflicts(row: Sequence[_RouteMessage]) -> list[tuple[int, ...]]:
    """Return [message] -> earlier sends that read the places that it writes."""
    reading: dict[int, list[int]] = defaultdict(list)  # place -> sends since it was written last
    conflicts: list[tuple[int, ...]] = []
    for i, message in enumerate(row):
        places = range(message.first, message.last)
        if message.is_send:
            for place in places:
                reading[place].append(i)
            conflicts.append(())
        else:
            conflicts.append(tuple(sorted({send for place in places for send in reading.pop(place, ())})))
    return conflicts


def _runs_to_end(rows: Sequence[Sequence[_RouteMessage]], waits: Sequence[Sequence[tuple[int, ...]]]) -> bool:
    """Return whether every rank finishes if a write waits for earlier sends of the same places, and those for their receivers."""
    at = [0] * len(rows)
    posted = [0] * len(rows)  # number of messages that a rank has begun: posted receives can complete
    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                message = row[at[rank]]
                can_write = all(posted[row[send].peer] > row[send].partner_index for send in waits[rank][at[rank]])
                if posted[rank] == at[rank] and (message.is_send or message.add or can_write):
                    posted[rank] += max(1, sum(1 for _ in _leading_reductions(row[at[rank] :])))
                    progressed = True
                if not message.is_send and not (can_write and posted[message.peer] > message.partner_index):
                    break
                at[rank] += 1
                progressed = True
    return all(step == len(row) for step, row in zip(at, rows, strict=True))


def _route_steps(row: Sequence[_RouteMessage], waits: Sequence[tuple[int, ...]], rank: int, copied: bool) -> tuple[RouteStep, ...]:
    """Return the row's steps, with consecutive sums merged. A step's number, by which others wait for it, is its first message's index."""
    copies = {send for after in waits for send in after} if copied else set[int]()
    steps: list[RouteStep] = []
    i = 0
    while i < len(row):
        message = row[i]
        after = () if copied else waits[i]
        if message.is_send:
            steps.append(SendStep(i, message.peer, message.first, message.last, message.number, i in copies))
        elif not message.add:
            steps.append(ReceiveStep(i, message.peer, message.first, message.last, message.number, after))
        else:
            merged = list(_leading_reductions(row[i:]))
            merged.sort(key=lambda m: (m.peer, m.number))
            peers = tuple(m.peer for m in merged)
            position = sum(peer < rank for peer in peers)
            steps.append(ReduceStep(i, peers, tuple(m.number for m in merged), message.first, message.last, position, after))
            i += len(merged) - 1
        i += 1
    return tuple(steps)


def _leading_reductions(row: Iterable[_RouteMessage]) -> Iterable[_RouteMessage]:
    """Yield the sums at the beginning of `row` that have the same target places."""
    head: _RouteMessage | None = None
    for message in row:
        head = head or message
        if message.is_send or not message.add or (message.first, message.last) != (head.first, head.last):
            return
        yield message
