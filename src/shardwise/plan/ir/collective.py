"""Semantics of collectives: what every rank holds before and what it wants after, from a name and numbers of ranks and chunks.

`chunk(c)` is chunk c of the tensor that all ranks have, `block(s,t)` what rank s has for rank t; a contribution is a rank's summand, or the
rank that had the chunk. Where ranks keep chunks, rank r has the r-th of equally many.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import Action, HeldValues, Recv, Send, Value

NAMES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def initial_and_wanted(name: str, num_ranks: int, num_chunks: int, root: int = 0) -> tuple[tuple[HeldValues, ...], tuple[HeldValues, ...]]:
    """Return (given, wants) by rank. `root`: the rank that has what a broadcast sends.

    >>> given, wants = initial_and_wanted("all_reduce", 2, 1)
    >>> given[1], wants[1]
    ({Value(name='chunk', index=(0,)): {1: 1}}, {Value(name='chunk', index=(0,)): {0: 1, 1: 1}})

    Raises:
        ProgramError: an unknown name, a root that is no rank, chunks that do not divide among ranks.
    """
    ranks = range(num_ranks)
    if name not in NAMES:
        raise ProgramError(f"{name} is not a collective; use {', '.join(NAMES)}")
    if root not in ranks:
        raise ProgramError(f"{name} {root}: there are ranks 0 to {num_ranks - 1}")
    if name == "all_to_all":
        initial = tuple({Value("block", (s, t)): {s: 1} for t in ranks} for s in ranks)
        return initial, tuple({Value("block", (s, t)): {s: 1} for s in ranks} for t in ranks)
    one_each = tuple({_chunk_value(c): {r: 1} for c in range(num_chunks)} for r in ranks)
    if name == "broadcast":
        everything: HeldValues = one_each[root]
        return tuple(everything if r == root else {} for r in ranks), (everything,) * num_ranks
    total: HeldValues = {_chunk_value(c): dict.fromkeys(ranks, 1) for c in range(num_chunks)}
    if name == "all_reduce":
        return one_each, (total,) * num_ranks
    if num_chunks % num_ranks:
        raise ProgramError(f"{name} of {num_chunks} chunks over {num_ranks} ranks; divide the tensor into a multiple of {num_ranks} chunks")
    chunks_each = num_chunks // num_ranks
    chunks = [[_chunk_value(c) for c in range(r * chunks_each, (r + 1) * chunks_each)] for r in ranks]
    if name == "reduce_scatter":
        return one_each, tuple({value: total[value] for value in values} for values in chunks)
    everything = {value: {r: 1} for r in ranks for value in chunks[r]}
    return tuple({value: {r: 1} for value in chunks[r]} for r in ranks), (everything,) * num_ranks


def count_chunks(actions: Iterable[Iterable[Action]]) -> int:
    """Count the chunks that the tensor is divided into: one more than the highest `chunk` that is sent or received.

    Raises:
        ProgramError: an action that is no transfer, since a collective has no other; a chunk that is never transferred.
    """
    first_transfer: dict[int, str] = {}  # chunk -> its first transfer
    for rank, row in enumerate(actions):
        for step, action in enumerate(row):
            if not isinstance(action, (Send, Recv)):
                raise ProgramError(f"rank {rank} step {step}: {action} is no transfer, and a collective has nothing else")
            if action.value.name == "chunk" and action.value.index:
                first_transfer.setdefault(action.value.index[0], f"rank {rank} step {step}: {action}")
    gap = next(c for c in count() if c not in first_transfer)
    if first_transfer and max(first_transfer) > gap:
        raise ProgramError(f"{first_transfer[max(first_transfer)]} transfers a chunk, but chunk({gap}) is missing; chunks have no gaps")
    return max(1, len(first_transfer))


def _chunk_value(index: int) -> Value:
    return Value("chunk", (index,))
