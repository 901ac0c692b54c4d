"""An LRU cache that builds missing values: the least recently used entry is evicted beyond a maximum number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MOST_FORMS = 32  # captures that an engine caches besides that of training
MOST_SIZES = 32  # microbatch sizes that a capture caches

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by key; beyond `max_entries` the least recently used one is evicted.

    >>> squares = Recent(2)
    >>> [squares.of(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], list(squares.held)
    ([1, 4, 1, 9], [1, 3])
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: OrderedDict[Hashable, T] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key, built if it is not cached."""
        if key not in self.held:
            self.held[key] = make()
            while len(self.held) > self.most:
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key]
