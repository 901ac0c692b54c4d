"""Halo exchange: the borders of a tensor that is cut in space go to the neighbours. In: sizes of the grid. Out: a program.

`edge(r,d,s)` is rank r's border along dimension d towards its lower (s = 0) or higher (s = 1) neighbour. Dimensions follow one another, so
that what a neighbour got along the first goes on along the second: corners need no messages of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from weft.collectives.steps import Move, Steps
from weft.errors import UsageError
from weft.plan.program import Held, Program, Value


def edge(rank: int, dim: int, side: int) -> Value:
    """Rank `rank`'s border along `dim`."""
    return Value("edge", (rank, dim, side))


def exchange(sizes: Sequence[int]) -> Program:
    """Both borders along every dimension of a grid of ranks, the last dimension's neighbours next in number; ends do not wrap.

    >>> from weft.plan.check import check
    >>> check(exchange([2, 3]))

    Raises:
        UsageError: a dimension without ranks.
    """
    if not sizes or min(sizes) < 1:
        raise UsageError(f"a grid of {' x '.join(map(str, sizes)) or 'no'} ranks; every dimension needs 1 or more")
    steps = Steps(prod(sizes))
    initial: list[Held] = [{} for _ in range(steps.num_ranks)]
    wants: list[Held] = [{} for _ in range(steps.num_ranks)]
    for dim in range(len(sizes)):
        stride = prod(sizes[dim + 1 :])
        moves = []
        for rank in range(steps.num_ranks):
            at = rank // stride % sizes[dim]
            for side, there in ((0, at - 1), (1, at + 1)):
                if 0 <= there < sizes[dim]:
                    neighbour = rank + (there - at) * stride
                    initial[rank] = {**initial[rank], edge(rank, dim, side): {rank: 1}}
                    wants[neighbour] = {**wants[neighbour], edge(rank, dim, side): {rank: 1}}
                    moves.append(Move(rank, neighbour, (edge(rank, dim, side),)))
        steps.together(moves)
    return steps.program("halo", initial, wants)
