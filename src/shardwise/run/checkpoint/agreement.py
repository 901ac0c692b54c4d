"""Agreement between ranks while saving and loading, by all-reduce (max) of a few integers. In: a World, or none. Out: `RankAgreement`.

A maximum of vectors serves as barrier, broadcast (other ranks pass -1), vote and set union, and needs no pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class RankAgreement(Protocol):
    """The ranks that save or load one checkpoint, and their generation (attempt at the run)."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over ranks, which all pass the same number of values; also a barrier."""
        ...


class SingleRank:
    """A single process."""

    rank = 0
    num_ranks = 1
    generation = 0

    def all_reduce_max(self, values: Sequence[int]) -> list[int]:
        return list(values)


def broadcast_from_first(ranks: RankAgreement, value: int) -> int:
    """Return rank 0's `value` (0 or more) on every rank."""
    return ranks.all_reduce_max([value if ranks.rank == 0 else -1])[0]


def first_failed(ranks: RankAgreement, why: str) -> tuple[int, str] | None:
    """Return, on every rank, the lowest failed rank and its reason `why`; None if every rank passes an empty reason.

    >>> first_failed(SingleRank(), "no room"), first_failed(SingleRank(), "")
    ((0, 'no room'), None)
    """
    rank_first = ranks.all_reduce_max([ranks.num_ranks - ranks.rank if why else 0])[0]
    if not rank_first:
        return None
    rank = ranks.num_ranks - rank_first
    text = why.encode() if ranks.rank == rank else b""
    length = ranks.all_reduce_max([len(text)])[0]
    return rank, bytes(ranks.all_reduce_max(list(text.ljust(length, b"\0")))).decode()
