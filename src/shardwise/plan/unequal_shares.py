"""Unequal batch shares of data replicas: `shares=3/2/2/1` as integers in that proportion.

Three or more equal ones may be written as in `5x3/4`, which is 5, 5, 5, 4. The loss is a sum over samples, divided by a count over the
whole batch, so that any division of the samples trains the same.
"""

from __future__ import annotations

from functools import cache
from math import gcd

from shardwise.errors import LayoutError
from shardwise.plan.ir.ranges import read_counts, write_counts


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
