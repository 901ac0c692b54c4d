"""What a collective means: what every rank holds before and what it wants after. In: a name, numbers of ranks and pieces. Out: `Held`.

`chunk(c)` is piece c of the tensor that all ranks have alike, `block(s,t)` what rank s has for rank t; a contribution is a rank's summand,
or the rank that had the piece. Where ranks keep pieces, rank r has the r-th of equally many.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from weft.errors import ProgramError
from weft.plan.program import Action, Held, Recv, Send, Value

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def ends(name: str, num_ranks: int, pieces: int, root: int = 0) -> tuple[tuple[Held, ...], tuple[Held, ...]]:
    """(given, wants) by rank. `root`: who has what a broadcast sends.

    >>> given, wants = ends("all_reduce", 2, 1)
    >>> given[1], wants[1]
    ({Value(name='chunk', index=(0,)): {1: 1}}, {Value(name='chunk', index=(0,)): {0: 1, 1: 1}})

    Raises:
        ProgramError: a name that is none, a root that is no rank, pieces that ranks cannot keep equally many of.
    """
    ranks = range(num_ranks)
    if name not in NAMES:
        raise ProgramError(f"{name} is not a collective; use {', '.join(NAMES)}")
    if root not in ranks:
        raise ProgramError(f"{name} {root}: there are ranks 0 to {num_ranks - 1}")
    if name == "all_to_all":
        initial = tuple({Value("block", (s, t)): {s: 1} for t in ranks} for s in ranks)
        return initial, tuple({Value("block", (s, t)): {s: 1} for s in ranks} for t in ranks)
    one_each = tuple({_chunk(c): {r: 1} for c in range(pieces)} for r in ranks)
    if name == "broadcast":
        everything: Held = one_each[root]
        return tuple(everything if r == root else {} for r in ranks), (everything,) * num_ranks
    total: Held = {_chunk(c): dict.fromkeys(ranks, 1) for c in range(pieces)}
    if name == "all_reduce":
        return one_each, (total,) * num_ranks
    if pieces % num_ranks:
        raise ProgramError(f"{name} of {pieces} pieces over {num_ranks} ranks; cut the tensor into a multiple of {num_ranks} pieces")
    each = pieces // num_ranks
    chunks = [[_chunk(c) for c in range(r * each, (r + 1) * each)] for r in ranks]
    if name == "reduce_scatter":
        return one_each, tuple({value: total[value] for value in values} for values in chunks)
    everything = {value: {r: 1} for r in ranks for value in chunks[r]}
    return tuple({value: {r: 1} for value in chunks[r]} for r in ranks), (everything,) * num_ranks


def num_pieces(actions: Iterable[Iterable[Action]]) -> int:
    """Into how many pieces the tensor is cut: one more than the highest `chunk` that is sent or received.

    Raises:
        ProgramError: an action that is no transfer, since a collective has no other; a piece beyond the first that is not moved.
    """
    moved: dict[int, str] = {}  # piece -> where first
    for rank, row in enumerate(actions):
        for step, action in enumerate(row):
            if not isinstance(action, (Send, Recv)):
                raise ProgramError(f"rank {rank} step {step}: {action} is no transfer, and a collective has nothing else")
            if action.value.name == "chunk" and action.value.index:
                moved.setdefault(action.value.index[0], f"rank {rank} step {step}: {action}")
    missing = next(c for c in count() if c not in moved)
    if moved and max(moved) > missing:
        raise ProgramError(f"{moved[max(moved)]} moves a piece, and chunk({missing}) is never moved; pieces count from 0 without gaps")
    return max(1, len(moved))


def _chunk(index: int) -> Value:
    return Value("chunk", (index,))
