"""Union-find: disjoint sets of hashable elements, merged pair by pair."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class UnionFind(Generic[T]):
    """Disjoint sets with a representative element each.

    >>> joined = UnionFind()
    >>> joined.union("ab"), joined.union("bc"), joined.root("c") == joined.root("a"), joined.root("d") == joined.root("a")
    (None, None, True, False)
    """

    def __init__(self) -> None:
        self.parent: dict[T, T] = {}

    def root(self, element: T) -> T:
        while (above := self.parent.setdefault(element, element)) != element:
            self.parent[element] = element = self.parent[above]
        return element

    def union(self, elements: Sequence[T]) -> None:
        """Merge the sets of these elements."""
        for element in elements:
            self.parent[self.root(element)] = self.root(elements[0])
