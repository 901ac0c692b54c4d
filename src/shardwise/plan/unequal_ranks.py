"""Ranks that are not alike: unequal batch shares of replicas, `shares=3/2/2/1`, and per-stage meshes, `inner=4x1/2x2`, as (data, tensor).

Three or more equal shares may be written as in `5x3/4`, which is 5, 5, 5, 4. The loss is a sum over samples, divided by a count over the
whole batch, so that any division of the samples trains the same.

Stages may have unequal numbers of ranks, `inner=2x1/1x1`: ranks then count through the stages in order.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate
from math import gcd

from shardwise.errors import LayoutError
from shardwise.plan.ir.ranges import read_counts, write_counts

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


@cache
def parse_shares(text: str, data: int) -> tuple[int, ...]:
    """Return the share of every replica, in lowest terms; () where all are equal.

    >>> parse_shares("6/4/4/2", 4), parse_shares("2x3/1", 4), parse_shares("5/5", 2), parse_shares("", 8)
    ((3, 2, 2, 1), (2, 2, 2, 1), (), ())

    Raises:
        LayoutError: another form, another number of shares than replicas, a replica without a share.
    """
    if not text:
        return ()
    counts = read_counts(text)
    if counts is None or not all(counts):
        raise LayoutError(f"shares={text} is not the share of each data replica, whole numbers from 1 on; for example shares=3/2/2/1")
    if len(counts) != data:
        raise LayoutError(f"shares={text} are of {len(counts)} replicas, and data={data}; give one for each")
    divisor = gcd(*counts)
    return () if len(set(counts)) == 1 else tuple(share // divisor for share in counts)


def format_shares(shares: tuple[int, ...]) -> str:
    """Format shares as `parse_shares` reads them.

    >>> format_shares((2, 2, 2, 1)), format_shares(())
    ('2x3/1', '')
    """
    return write_counts(shares)
