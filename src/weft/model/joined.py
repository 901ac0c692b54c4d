"""What belongs together, followed pair by pair (union-find). In: groups of things that can be hashed. Out: one of each set as its root."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Joined(Generic[T]):
    """Sets that grow together.

    >>> joined = Joined()
    >>> joined.add("ab"), joined.add("bc"), joined.root("c") == joined.root("a"), joined.root("d") == joined.root("a")
    (None, None, True, False)
    """

    def __init__(self) -> None:
        self.parent: dict[T, T] = {}

    def root(self, one: T) -> T:
        while (above := self.parent.setdefault(one, one)) != one:
            self.parent[one] = one = self.parent[above]
        return one

    def add(self, those: Sequence[T]) -> None:
        """All of these are in one set."""
        for one in those:
            self.parent[self.root(one)] = self.root(those[0])
