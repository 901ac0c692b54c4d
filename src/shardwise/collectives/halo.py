"""Halo exchange: each rank sends the borders of its spatial shard to its neighbours. In: sizes of the grid. Out: a program.

`edge(r,d,s)` is rank r's border along dimension d towards its lower (s = 0) or higher (s = 1) neighbour. Dimensions are exchanged one after
the other, so that borders received along the first are forwarded along the second: corners need no messages of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder
from shardwise.errors import UsageError
from shardwise.plan.ir.program import HeldValues, Program, Value


def edge_value(rank: int, dim: int, side: int) -> Value:
    """Return the value of rank `rank`'s border along `dim`, lower (`side` 0) or higher (1)."""
    return Value("edge", (rank, dim, side))


def halo_exchange(sizes: Sequence[int]) -> Program:
    """Return the exchange of both borders along every dimension of a grid of ranks (row-major, last dimension fastest), without wrapping.

    >>> from shardwise.plan.ir.check import check
    >>> check(halo_exchange([2, 3]))

    Raises:
        UsageError: a dimension without ranks.
    """
    if not sizes or min(sizes) < 1:
        raise UsageError(f"a grid of {' x '.join(map(str, sizes)) or 'no'} ranks; every dimension needs 1 or more")
    steps = CollectiveBuilder(prod(sizes))
    initial: list[HeldValues] = [{} for _ in range(steps.num_ranks)]
    wants: list[HeldValues] = [{} for _ in range(steps.num_ranks)]
    for dim in range(len(sizes)):
        stride = prod(sizes[dim + 1 :])
        moves = []
        for rank in range(steps.num_ranks):
            position = rank // stride % sizes[dim]
            for side, next_position in ((0, position - 1), (1, position + 1)):
                if 0 <= next_position < sizes[dim]:
                    neighbour = rank + (next_position - position) * stride
                    initial[rank] = {**initial[rank], edge_value(rank, dim, side): {rank: 1}}
                    wants[neighbour] = {**wants[neighbour], edge_value(rank, dim, side): {rank: 1}}
                    moves.append(ChunkTransfer(rank, neighbour, (edge_value(rank, dim, side),)))
        steps.add_step(moves)
    return steps.program("halo", initial, wants)
