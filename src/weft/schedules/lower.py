"""From the order of computes per rank to a `Program`: where the sends and receives go, and what must hold at the end.

In: per rank a list of `Compute`, links between stages, a name. A rank may have several stages and a stage several ranks,
as long as each microbatch of a stage runs on one of them. Out: a `Program`. Not modelled: times; every order here follows
from the order of the computes alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from weft.errors import ProgramError
from weft.plan.program import Action, Compute, Links, Program, Recv, Send, Value, chain, effects, is_pair, order
from weft.plan.text import default_wants

Rows = Sequence[Sequence[Compute]]  # [rank] -> its computes, in order


def pipeline(name: str, rows: Rows, links: Links | None = None, rendezvous: bool = False) -> Program:
    """The program of these computes, with transfers.

    A send stands right after what makes its value, the nearest reader's first, and a receive right before what reads its
    value, the farthest maker's first: the order in which they are wanted and made. With `rendezvous` some receives stand
    earlier, see `receive_in_time`.

    >>> from weft.plan.program import Op
    >>> print(pipeline("one", [[Compute(Op.F, 0, 0), Compute(Op.B, 0, 0)], [Compute(Op.F, 1, 0), Compute(Op.B, 1, 0)]]))
    program one
    rank 0: 0F0 x(0,1,0)>1 g(1,0,0)<1 0B0
    rank 1: x(0,1,0)<0 1F0 1B0 g(1,0,0)>0

    Raises:
        ProgramError: a compute that two ranks have.
    """
    num_stages = 1 + max((a.stage for row in rows for a in row), default=-1)
    computes = tuple(tuple(row) for row in rows)
    bare = Program(name, num_stages, ({},) * len(rows), computes, default_wants(computes), chain(num_stages) if links is None else links)
    program = add_transfers(bare)
    return receive_in_time(program) if rendezvous else program


def add_transfers(program: Program) -> Program:
    """Put a send after each producer and a receive before each consumer that is on another rank."""
    made_on: dict[Value, int] = {}
    read_on: dict[Value, int] = {}
    for rank, row in enumerate(program.actions):
        for action in row:
            e = effects(action, program)
            for value in e.writes:
                if made_on.setdefault(value, rank) != rank:
                    raise ProgramError(f"{program.name}: {value} is made on ranks {made_on[value]} and {rank}; {action} is one too many")
            read_on.update(dict.fromkeys(e.reads, rank))
    out = []
    for rank, row in enumerate(program.actions):
        line: list[Action] = []
        for action in row:
            e = effects(action, program)
            wanted = [v for v in e.reads if made_on.get(v, rank) != rank]
            made = [v for v in e.writes if read_on.get(v, rank) != rank]
            line += [Recv(v, made_on[v]) for v in sorted(wanted, key=_distance, reverse=True)]
            line.append(action)
            line += [Send(v, read_on[v]) for v in sorted(made, key=_distance)]
        out.append(tuple(line))
    return replace(program, actions=tuple(out))


def _distance(value: Value) -> int:
    """Stages between the two ends of a link value: the nearer reader runs sooner, the farther maker ran earlier."""
    return abs(value.index[0] - value.index[1])


def receive_in_time(program: Program) -> Program:
    """The same program with receives moved ahead where two ranks would otherwise block on sending to each other.

    Wanted where a send waits for its receive. Ranks run until none can move; then along the ranks that wait for one
    another there is one at a send whose receiver is at a send too: the receiver takes that value first. Nothing else is
    moved, so receives stay as late as possible.

    Raises:
        ProgramError: a program that cannot run even if sends do not wait.
    """
    rows = [list(row) for row in program.actions]
    at = [0] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        while ready:
            _run(rows, at, ready.pop(), ready)
        blocked = next((rank for rank, row in enumerate(rows) if at[rank] < len(row)), None)
        if blocked is not None:
            receiver, step = _early_receive(program, rows, at, blocked)
            rows[receiver].insert(at[receiver], rows[receiver].pop(step))
            ready.append(receiver)
    return replace(program, actions=tuple(tuple(row) for row in rows))


def _run(rows: list[list[Action]], at: list[int], rank: int, ready: list[int]) -> None:
    """Move `rank` on until its next transfer has no partner; a partner that was waiting becomes ready."""
    while at[rank] < len(rows[rank]):
        action = rows[rank][at[rank]]
        if isinstance(action, (Send, Recv)):
            peer = _peer(action)
            if at[peer] == len(rows[peer]) or not is_pair(rank, action, rows[peer][at[peer]]):
                return
            at[peer] += 1
            ready.append(peer)
        at[rank] += 1


def _early_receive(program: Program, rows: list[list[Action]], at: list[int], rank: int) -> tuple[int, int]:
    """(receiver, step) of the nearest receive that frees the ranks which wait for one another, found from `rank` on."""
    circle: list[int] = []
    while rank not in circle:
        circle.append(rank)
        action = rows[rank][at[rank]] if at[rank] < len(rows[rank]) else None
        if not isinstance(action, (Send, Recv)):
            break
        rank = _peer(action)
    found = []
    for sender in circle[circle.index(rank) :]:
        action = rows[sender][at[sender]] if at[sender] < len(rows[sender]) else None
        if isinstance(action, Send):
            row = rows[action.to]
            step = next((i for i in range(at[action.to], len(row)) if is_pair(sender, action, row[i])), None)
            if step is not None:
                found.append((step - at[action.to], action.to, step))
    if not found:
        deque(order(program), maxlen=0)  # says who is stuck, if posted sends do not help either
        raise ProgramError(f"{program.name}: rank {rank} waits for a receive that is not there")
    _, receiver, step = min(found)
    return receiver, step


def _peer(action: Send | Recv) -> int:
    return action.to if isinstance(action, Send) else action.source
