"""Pipeline programs run once more, on words: an explicit-state simulator that shares no line with shardwise's.

What it knows stands in docs/schedules.md and at the head of `shardwise.plan.ir.program`. Ranks move as far as they can; a rank stops for
ever at
its first mistake, and the others go on.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field

State = dict[str, dict[int, int]]
Word = tuple[str, str, int, int]  # kind, op or value, stage or peer, microbatch (-1: none) or whether it adds

_COMPUTE = re.compile(r"(\d+)([FBIWR])(\d+)")
_MANAGE = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD|OFFLOAD|LOAD|DROP)(\d*)")
_TRANSFER = re.compile(r"(\w+\([\d,]*\))(>|<|\+<)(\d+)")
_MOVES = {"DROP": ("saved", "inputs"), "OFFLOAD": ("saved", "host"), "LOAD": ("host", "saved")}


class Mistake(Exception):
    """What a rank must not do."""


def read(word: str) -> Word:
    """One action."""
    if found := _COMPUTE.fullmatch(word):
        return "compute", found[2], int(found[1]), int(found[3])
    if found := _MANAGE.fullmatch(word):
        return "manage", found[2], int(found[1]), int(found[3] or -1)
    found = _TRANSFER.fullmatch(word)
    assert found, word
    return ("send" if found[2] == ">" else "receive"), found[1], int(found[3]), int(found[2] == "+<")


@dataclass
class Ended:
    """How far every rank came, and what is wrong."""

    at: list[int]
    states: list[State]
    mistakes: dict[int, int] = field(default_factory=dict)  # rank -> step
    stuck: bool = False
    unread: list[tuple[int, int]] = field(default_factory=list)  # (rank, step) of sends that nobody takes
    unmet: list[int] = field(default_factory=list)  # ranks that do not end with what they want

    @property
    def proven(self) -> bool:
        return not (self.mistakes or self.stuck or self.unread or self.unmet)


def run(rows: list[list[str]], rendezvous: bool) -> Ended:
    """Run the words of every rank, of a chain of stages."""
    words = [[read(word) for word in row] for row in rows]
    computed = [[w for w in row if w[0] == "compute"] for row in words]
    last = max((w[2] for row in computed for w in row), default=-1)
    gathered = {w[2] for row in words for w in row if w[1] == "UNSHARD"}
    end = Ended([0] * len(rows), [{} for _ in rows])
    wire: dict[tuple[int, int, str], deque[tuple[int, dict[int, int]]]] = defaultdict(deque)

    def tries(rank: int) -> bool:
        """One step of a rank, and of its partner where both move; whether any moved or stopped for ever."""
        word = words[rank][end.at[rank]]
        kind, what, peer, _ = word
        mover = rank
        try:
            if kind in ("compute", "manage"):
                _local(end.states[rank], word, last, gathered)
            elif rendezvous:
                if peer in end.mistakes or end.at[peer] == len(words[peer]):
                    return False
                other = words[peer][end.at[peer]]
                if {kind, other[0]} != {"send", "receive"} or other[1:3] != (what, rank):
                    return False
                source, target = (rank, peer) if kind == "send" else (peer, rank)
                mover = source
                content = _taken(end.states[source], what)
                end.at[source] += 1
                mover = target
                _arrive(end.states[target], words[target][end.at[target]], content)
            elif kind == "send":
                wire[rank, peer, what].append((end.at[rank], _taken(end.states[rank], what)))
            elif wire[peer, rank, what]:
                _arrive(end.states[rank], word, wire[peer, rank, what].popleft()[1])
            else:
                return False
        except Mistake:
            end.mistakes[mover] = end.at[mover]
            return True
        end.at[mover] += 1
        return True

    moving = True
    while moving:
        moving = False
        for rank in range(len(rows)):
            while rank not in end.mistakes and end.at[rank] < len(words[rank]) and tries(rank):
                moving = True
    end.stuck = not end.mistakes and any(at < len(row) for at, row in zip(end.at, words, strict=True))
    end.unread = [(source, waiting[0][0]) for (source, _, _), waiting in wire.items() if waiting]
    every = {w[3] for row in computed for w in row}
    reduced = {w[2] for row in words for w in row if w[1] == "REDUCE_GRAD"}
    if any(w[1] != "F" for row in computed for w in row):
        for rank, row in enumerate(computed):
            names = {("grad" if w[2] in reduced else "dw") + f"({w[2]})" for w in row}
            left = any(name.partition("(")[0] in ("saved", "half", "host", "inputs") for name in end.states[rank])
            if left or any(end.states[rank].get(name) != dict.fromkeys(every, 1) for name in names):
                end.unmet.append(rank)
    return end


def _local(state: State, word: Word, last: int, gathered: set[int]) -> None:
    _, op, s, m = word
    one, saved, half = {m: 1}, f"saved({s},{m})", f"half({s},{m})"
    if op in _MOVES:
        before, after = (f"{name}({s},{m})" for name in _MOVES[op])
        content = state.get(before, {})
        _exchange(state, [before], [after], content, content)
    elif op == "UNSHARD":
        _exchange(state, [], [f"w({s})"], {}, {})
    elif op == "RESHARD":
        _exchange(state, [f"w({s})"], [], {}, {})
    elif op == "REDUCE_GRAD":
        if f"dw({s})" not in state:
            raise Mistake
        _add(state.setdefault(f"grad({s})", {}), state.pop(f"dw({s})"))
    else:
        if s in gathered and f"w({s})" not in state:
            raise Mistake
        ins = [f"x({s - 1},{s},{m})"] * (s > 0)
        outs = [f"x({s},{s + 1},{m})"] * (s < last)
        back_in, back_out = [f"g({s + 1},{s},{m})"] * (s < last), [f"g({s},{s - 1},{m})"] * (s > 0)
        reads, writes = {
            "F": (ins, [*outs, saved]),
            "B": ([saved, *back_in], back_out),
            "I": ([saved, *back_in], [*back_out, half]),
            "W": ([half], []),
            "R": ([f"inputs({s},{m})"], [saved]),
        }[op]
        _exchange(state, reads, writes, one, one)
        if op in "BW":
            _add(state.setdefault(f"dw({s})", {}), one)


def _exchange(state: State, reads: list[str], writes: list[str], wanted: dict[int, int], made: dict[int, int]) -> None:
    if any(state.get(name) != wanted for name in reads) or any(name in state for name in writes):
        raise Mistake
    for name in reads:
        del state[name]
    state.update((name, dict(made)) for name in writes)


def _taken(state: State, name: str) -> dict[int, int]:
    if name not in state:
        raise Mistake
    return state.pop(name) if name[:2] in ("x(", "g(") else dict(state[name])


def _arrive(state: State, word: Word, content: dict[int, int]) -> None:
    _, name, _, adds = word
    if adds:
        if name not in state:
            raise Mistake
        _add(state[name], content)
    else:
        state[name] = content


def _add(total: dict[int, int], more: dict[int, int]) -> None:
    for key, count in more.items():
        total[key] = total.get(key, 0) + count
