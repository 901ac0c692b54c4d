"""Move receives ahead, for transports with blocking sends. In: a program. Out: the same computes and sends, with earlier receives."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Action, Program, Recv, Send, is_pair, walk_actions


def advance_receives(program: Program) -> Program:
    """Return the program with receives moved ahead where ranks would otherwise deadlock on sending to each other.

    Needed where a send waits for its receive. Ranks run until none can proceed; then the cycle of waiting ranks has one at a
    send whose receiver is at a send too: the receiver takes that value first. Nothing else is moved, so receives stay as late
    as possible.

    Raises:
        ProgramError: a program that cannot run even if sends do not wait.
    """
    rows = [list(row) for row in program.actions]
    at = [0] * len(rows)
    ready = list(range(len(rows)))
    while ready:
        while ready:
            _run_until_blocked(rows, at, ready.pop(), ready)
        blocked = next((rank for rank, row in enumerate(rows) if at[rank] < len(row)), None)
        if blocked is not None:
            receiver, step = _find_early_receive(program, rows, at, blocked)
            rows[receiver].insert(at[receiver], rows[receiver].pop(step))
            ready.append(receiver)
    return replace(program, actions=tuple(tuple(row) for row in rows))


def _run_until_blocked(rows: list[list[Action]], at: list[int], rank: int, ready: list[int]) -> None:
    """Advance `rank` until its next transfer has no partner; a partner that was waiting becomes ready."""
    while at[rank] < len(rows[rank]):
        action = rows[rank][at[rank]]
        if isinstance(action, (Send, Recv)):
            peer = _peer_rank(action)
            if at[peer] == len(rows[peer]) or not is_pair(rank, action, rows[peer][at[peer]]):
                return
            at[peer] += 1
            ready.append(peer)
        at[rank] += 1


def _find_early_receive(program: Program, rows: list[list[Action]], at: list[int], rank: int) -> tuple[int, int]:
    """Return (receiver, step) of the nearest receive that resolves the cycle of waiting ranks reached from `rank`."""
    cycle: list[int] = []
    while rank not in cycle:
        cycle.append(rank)
        action = rows[rank][at[rank]] if at[rank] < len(rows[rank]) else None
        if not isinstance(action, (Send, Recv)):
            break
        rank = _peer_rank(action)
    candidates = []
    for sender in cycle[cycle.index(rank) :]:
        action = rows[sender][at[sender]] if at[sender] < len(rows[sender]) else None
        if isinstance(action, Send):
            row = rows[action.to]
            step = next((i for i in range(at[action.to], len(row)) if is_pair(sender, action, row[i])), None)
            if step is not None:
                candidates.append((step - at[action.to], action.to, step))
    if not candidates:
        deque(walk_actions(program), maxlen=0)  # raises the error, if asynchronous sends do not help either
        raise ProgramError(_describe_unreceived_send(program, rows, at, cycle))
    _, receiver, step = min(candidates)
    return receiver, step


def _describe_unreceived_send(program: Program, rows: list[list[Action]], at: list[int], cycle: list[int]) -> str:
    """Describe the send, among those where ranks of `cycle` wait, that has no receive, in a program that runs with asynchronous sends."""
    for rank in cycle:
        action = rows[rank][at[rank]] if at[rank] < len(rows[rank]) else None
        if isinstance(action, Send) and not any(is_pair(rank, action, receive) for receive in rows[action.to][at[action.to] :]):
            num_before = rows[rank][: at[rank]].count(action)  # receives have moved, but sends are in their order
            step = [i for i, candidate in enumerate(program.actions[rank]) if candidate == action][num_before]
            return f"{program.name}: rank {rank} step {step}: {action} is never received"
    raise AssertionError("a deadlock though no receive is missing")


def _peer_rank(action: Send | Recv) -> int:
    return action.to if isinstance(action, Send) else action.source
