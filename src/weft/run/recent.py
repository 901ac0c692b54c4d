"""A bounded set of what was made. In: keys, and how to make what belongs to one. Out: what was made; of too many the oldest leave."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

MOST_FORMS = 32  # captures that a model keeps beside that of its training
MOST_SIZES = 32  # of microbatches, that a capture keeps

T = TypeVar("T")


class Recent(Generic[T]):
    """What was made, by key; of more than `most` the one that was not asked for longest leaves.

    >>> squares = Recent(2)
    >>> [squares.of(n, lambda n=n: n * n) for n in (1, 2, 1, 3)], list(squares.held)
    ([1, 4, 1, 9], [1, 3])
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.held: OrderedDict[Hashable, T] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], T]) -> T:
        """What belongs to a key, made where it is not there."""
        if key not in self.held:
            self.held[key] = make()
            while len(self.held) > self.most:
                self.held.popitem(last=False)
        self.held.move_to_end(key)
        return self.held[key]
