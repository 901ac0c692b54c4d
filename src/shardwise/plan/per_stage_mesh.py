"""Per-stage meshes: how the ranks of each pipeline stage are arranged where stages differ, `inner=4x1/2x2`, as (data, tensor) of each
stage.

Stages may have unequal numbers of ranks, `inner=2x1/1x1`: ranks then count through the stages in order.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from shardwise.errors import LayoutError

StageSizes = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def parse_inner(text: str) -> StageSizes:
    """Return (data, tensor) of every stage.

    >>> parse_inner("4x1/2x2")
    ((4, 1), (2, 2))

    Raises:
        LayoutError: another form.
    """
    axes = []
    for word in text.split("/"):
        numbers = word.split("x")
        if len(numbers) != 2 or not all(n.isdecimal() and 0 < len(n) < 7 and int(n) for n in numbers):
            raise LayoutError(f"inner={text}: {word!r} is not data x tensor of a stage; for example inner=4x1/2x2")
        axes.append((int(numbers[0]), int(numbers[1])))
    return tuple(axes)


def first_ranks_of_stages(inner: StageSizes, positions: int = 1) -> tuple[int, ...]:
    """Return the first rank of every stage, and after the last one the total; () where stages have equally many. `positions`: ranks that
    share the positions of a sample.

    >>> first_ranks_of_stages(((2, 1), (1, 1))), first_ranks_of_stages(((2, 1), (1, 2)))
    ((0, 2, 3), ())
    """
    ranks = [data * tensor * positions for data, tensor in inner]
    return tuple(accumulate(ranks, initial=0)) if len(set(ranks)) > 1 else ()
