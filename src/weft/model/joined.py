"""Union-find: disjoint sets of hashable elements, merged pair by pair."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Joined(Generic[T]):
    """Disjoint sets with a representative element each.

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
        """Merge the sets of these elements."""
        for element in those:
            self.parent[self.root(element)] = self.root(those[0])
