"""A collective's `Program` made ready for running: per rank the messages that it sends and takes, and what each must wait for.

In: a program of sends and receives, and the order in which its values lie in memory. Out: a `Route` for every rank. Neighbouring values
that both ends handle next to one another are one message. A receive that adds goes to a room of its own; several sums in a row into one
place are added in the order of the ranks they come from, this rank's own among them, so that ranks that add the same have the same bits.

A send lasts until its receiver is there, and what it reads must not change meanwhile. Where waiting for that could stop the ranks for ever
(found by walking the program so) sends leave from copies. Not modelled: sizes, and time.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.errors import ProgramError
from weft.plan.action import Action
from weft.plan.program import Program, Recv, Send, Value


class Away(NamedTuple):
    """Send places `first` to `last` (exclusive) to rank `peer`, as message `number` between the two; `copied`: from a copy."""

    step: int
    peer: int
    first: int
    last: int
    number: int
    copied: bool


class Take(NamedTuple):
    """Receive places `first` to `last` from rank `peer`, straight into them, once the sends that began at steps `after` have ended."""

    step: int
    peer: int
    first: int
    last: int
    number: int
    after: tuple[int, ...]


class Sum(NamedTuple):
    """Add the messages of ranks `peers`, ascending, with this rank's own before the `place`-th of them."""

    step: int
    peers: tuple[int, ...]
    numbers: tuple[int, ...]
    first: int
    last: int
    place: int
    after: tuple[int, ...]


Step = Away | Take | Sum


@dataclass(frozen=True)
class Route:
    """What one rank does: `steps` in order, of a program in which `places` values lie in a row. `mark` tells programs apart."""

    name: str
    rank: int
    places: int
    steps: tuple[Step, ...]
    mark: int


class _Message(NamedTuple):
    sends: bool
    peer: int
    first: int
    last: int
    add: bool
    number: int
    partner: int  # where the other end's message stands in its rank's row


def routes(program: Program, lineup: Sequence[Value], joined: bool = True) -> tuple[Route, ...]:
    """The route of every rank. `lineup`: every value that crosses, in the order in which they lie; `joined`: next to one another in memory.

    >>> program = Program.parse("rank 0: chunk(0)>1 chunk(0)<1\\nrank 1: chunk(0)+<0 chunk(0)>0")
    >>> [type(step).__name__ for step in routes(program, [Value("chunk", (0,))])[1].steps]
    ['Sum', 'Away']

    Raises:
        ProgramError: an action that is no transfer, a value that is not in `lineup`, a send without its receive.
    """
    rows = _messages(program, {value: i for i, value in enumerate(lineup)}, joined)
    waits = [_conflicts(row) for row in rows]
    copied = not _ends(rows, waits)
    mark = zlib.crc32(f"{program.name}/{program.actions}".encode())
    return tuple(Route(program.name, rank, len(lineup), _steps(row, waits[rank], rank, copied), mark) for rank, row in enumerate(rows))


def _partners(program: Program, place: Mapping[Value, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(rank, step) of every send -> (rank, step) where it is received."""
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
    if left := [(rank, steps[0], Send(value, to)) for (rank, to, value), steps in sent.items() if steps]:
        raise ProgramError(f"{program.name}: rank {left[0][0]} step {left[0][1]}: {left[0][2]} is never received")
    return partner


def _follows(action: Action, at: int, place: Mapping[Value, int]) -> bool:
    """Whether it sends the value that lies at place `at`."""
    return isinstance(action, Send) and place[action.value] == at


def _messages(program: Program, place: dict[Value, int], joined: bool) -> list[list[_Message]]:
    """[rank] -> its messages in order."""
    partner = _partners(program, place)
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
            there = program.actions[to]
            first = place[action.value]
            length = 1
            while joined and step + length < len(row) and at + length < len(there):
                if partner.get((rank, step + length)) != (to, at + length) or not _follows(row[step + length], first + length, place):
                    break
                if getattr(there[at + length], "add", False) != getattr(there[at], "add", False):
                    break
                length += 1
            add = getattr(there[at], "add", False)
            number = numbers[rank, to]
            numbers[rank, to] += 1
            begun[rank][step] = (True, to, first, first + length, add, number, (to, at))
            begun[to][at] = (False, rank, first, first + length, add, number, (rank, step))
            step += length
    position = [{step: i for i, step in enumerate(sorted(row))} for row in begun]
    return [[_Message(*row[step][:6], position[row[step][6][0]][row[step][6][1]]) for step in sorted(row)] for row in begun]


def _conflicts(row: Sequence[_Message]) -> list[tuple[int, ...]]:
    """[message] -> earlier sends that read what it writes."""
    reading: dict[int, list[int]] = defaultdict(list)  # place -> sends since it was written last
    conflicts: list[tuple[int, ...]] = []
    for i, message in enumerate(row):
        places = range(message.first, message.last)
        if message.sends:
            for place in places:
                reading[place].append(i)
            conflicts.append(())
        else:
            conflicts.append(tuple(sorted({send for place in places for send in reading.pop(place, ())})))
    return conflicts


def _ends(rows: Sequence[Sequence[_Message]], waits: Sequence[Sequence[tuple[int, ...]]]) -> bool:
    """Whether every rank gets to its end where a write waits for earlier sends of what it writes, and those for their receivers."""
    at = [0] * len(rows)
    posted = [0] * len(rows)  # how many of its messages a rank has begun: what receives there, can come
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                message = row[at[rank]]
                free = all(posted[row[send].peer] > row[send].partner for send in waits[rank][at[rank]])
                if posted[rank] == at[rank] and (message.sends or message.add or free):
                    posted[rank] += max(1, sum(1 for _ in _merged_sums(row[at[rank] :])))
                    moved = True
                if not message.sends and not (free and posted[message.peer] > message.partner):
                    break
                at[rank] += 1
                moved = True
    return all(step == len(row) for step, row in zip(at, rows, strict=True))


def _steps(row: Sequence[_Message], waits: Sequence[tuple[int, ...]], rank: int, copied: bool) -> tuple[Step, ...]:
    """The row with sums in a row joined. Messages that are waited for are told by their number in the row, which is their step."""
    copies = {send for after in waits for send in after} if copied else set[int]()
    steps: list[Step] = []
    i = 0
    while i < len(row):
        message = row[i]
        after = () if copied else waits[i]
        if message.sends:
            steps.append(Away(i, message.peer, message.first, message.last, message.number, i in copies))
        elif not message.add:
            steps.append(Take(i, message.peer, message.first, message.last, message.number, after))
        else:
            merged = list(_merged_sums(row[i:]))
            merged.sort(key=lambda one: (one.peer, one.number))
            peers = tuple(one.peer for one in merged)
            place = sum(peer < rank for peer in peers)
            steps.append(Sum(i, peers, tuple(one.number for one in merged), message.first, message.last, place, after))
            i += len(merged) - 1
        i += 1
    return tuple(steps)


def _merged_sums(row: Iterable[_Message]) -> Iterable[_Message]:
    """The sums at the beginning of `row` that go to the same place."""
    head: _Message | None = None
    for message in row:
        head = head or message
        if message.sends or not message.add or (message.first, message.last) != (head.first, head.last):
            return
        yield message
