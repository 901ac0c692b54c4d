"""Agreement between ranks while saving and loading, by all-reduce (max) of a few integers. In: a World, or none. Out: `RankAgreement`.

A maximum of vectors serves as barrier, broadcast (other ranks pass -1), vote and set union, and needs no pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Together(Protocol):
    """The ranks that save or load one checkpoint, and their generation (attempt at the run)."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over ranks, which all pass the same number of values; also a barrier."""
        ...


class Alone:
    """A single process."""

    rank = 0
    num_ranks = 1
    generation = 0

    def maximum(self, values: Sequence[int]) -> list[int]:
        return list(values)


def from_first(together: Together, value: int) -> int:
    """Return rank 0's `value` (0 or more) on every rank."""
    return together.maximum([value if together.rank == 0 else -1])[0]


def first_failed(together: Together, why: str) -> tuple[int, str] | None:
    """Return, on every rank, the lowest failed rank and its reason `why`; None if every rank passes an empty reason.

    >>> first_failed(Alone(), "no room"), first_failed(Alone(), "")
    ((0, 'no room'), None)
    """
    rank_first = together.maximum([together.num_ranks - together.rank if why else 0])[0]
    if not rank_first:
        return None
    rank = together.num_ranks - rank_first
    text = why.encode() if together.rank == rank else b""
    length = together.maximum([len(text)])[0]
    return rank, bytes(together.maximum(list(text.ljust(length, b"\0")))).decode()
