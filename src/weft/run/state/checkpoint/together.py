"""How ranks agree while they save and load: the maximum of a few whole numbers. In: a World, or none. Out: `Together`.

A maximum of vectors is a barrier, a broadcast (the others give -1), a vote and a set union at once, and carries no pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Together(Protocol):
    """The ranks that save or load one checkpoint, and which attempt at the run they are."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element-wise maximum over ranks; every rank gives as many values. Returns when all have."""
        ...


class Alone:
    """One process."""

    rank = 0
    num_ranks = 1
    generation = 0

    def maximum(self, values: Sequence[int]) -> list[int]:
        return list(values)


def from_first(together: Together, value: int) -> int:
    """Rank 0's `value` (0 or more), on every rank."""
    return together.maximum([value if together.rank == 0 else -1])[0]


def first_failed(together: Together, why: str) -> tuple[int, str] | None:
    """The lowest rank that says `why` it failed, and what it says, on every rank; None where every rank gives an empty text.

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
