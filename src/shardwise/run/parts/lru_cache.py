"""An LRU cache that builds missing values: the least recently used entry is evicted beyond a maximum number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

MAX_CAPTURES = 32  # captures that an engine caches besides that of training
MAX_MICROBATCH_SIZES = 32  # microbatch sizes that a capture caches

T = TypeVar("T")
_MISSING: Any = object()


class LRUCache(Generic[T]):
    """Values by key; beyond `max_entries` the least recently used one is evicted.

    >>> squares = LRUCache(2)
    >>> [squares.get_or_build(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], list(squares.entries)
    ([1, 4, 1, 9], [1, 3])
    """

    def __init__(self, max_entries: int) -> None:
        self.max_entries = max_entries
        self.entries: OrderedDict[Hashable, T] = OrderedDict()

    def find(self, key: Hashable) -> T | None:
        """Return the value of a key, None if it is not cached."""
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def get_or_build(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value of a key, built if it is not cached."""
        value: T = self.entries.get(key, _MISSING)
        if value is _MISSING:
            value = self.entries[key] = build()
            while len(self.entries) > self.max_entries:
                self.entries.popitem(last=False)
        self.entries.move_to_end(key)
        return value
