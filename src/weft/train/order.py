"""Which sample comes when, from the seed and the step alone. In: how many samples there are. Out: their numbers, step by step.

Whatever the layout and however often a run is resumed, step n has the same samples, and every sample comes once an epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Read = TypeVar("Read")
_ROUNDS = 4
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment


def permute(index: Numbers, size: int, key: int) -> Numbers:
    """Where a keyed permutation of range(size) takes each of `index`, without ever writing the permutation down.

    A Feistel network (Luby and Rackoff, SIAM J. Comput. 1988) over the next even power of two, walked along its cycle until
    the number is below `size` (Black and Rogaway, CT-RSA 2002): any epoch of any corpus in constant memory.

    >>> sorted(permute(np.arange(5), 5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [_mix(np.uint64((key + r * _GOLDEN) % 2**64)) for r in range(1, _ROUNDS + 1)]
    value = index.astype(np.uint64)
    out = np.empty(index.shape, np.int64)
    left = np.arange(index.size)
    flat, result = value.reshape(-1), out.reshape(-1)
    while left.size:
        high, low = flat >> np.uint64(half), flat & mask
        for k in keys:
            high, low = low, high ^ (_mix(low ^ k) & mask)
        flat = high << np.uint64(half) | low
        inside = flat < size
        result[left[inside]] = flat[inside].astype(np.int64)
        left, flat = left[~inside], flat[~inside]
    return out


def _mix(x: Any) -> Any:
    """SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """`total` samples, of which whole blocks of `block` neighbours, chosen by the seed, are kept for validation, or, where `held_out` is
    not 0, none of these but the `held_out` samples that are numbered after them.

    >>> order = Order(total=10, batch=4, validation_fraction=0.2, seed=0)
    >>> order.num_samples, order.num_validation
    (8, 2)
    >>> order.train(0, range(4)).tolist() == order.train(0, [0, 1]).tolist() + order.train(0, [2, 3]).tolist()
    True
    """

    total: int
    batch: int
    validation_fraction: float
    seed: int
    block: int = 1
    held_out: int = 0

    @property
    def _blocks(self) -> int:
        return self.total // self.block

    @property
    def _validation_blocks(self) -> int:
        return 0 if self.held_out else max(1, min(self._blocks - 1, round(self._blocks * self.validation_fraction)))

    @property
    def num_samples(self) -> int:
        """Training samples of one epoch."""
        return (self._blocks - self._validation_blocks) * self.block

    @property
    def num_validation(self) -> int:
        return self.held_out or self._validation_blocks * self.block

    def number(self, step: int, rows: Sequence[int]) -> Numbers:
        """Numbers of a step's rows through all epochs."""
        return step * self.batch + np.asarray(rows, np.int64)

    def train(self, step: int, rows: Sequence[int]) -> Numbers:
        """Samples in these rows of the global batch of `step`. Numbers run through all epochs, so a batch may reach over two."""
        epoch, at = np.divmod(self.number(step, rows), self.num_samples)
        for one in np.unique(epoch):
            here = epoch == one
            at[here] = permute(at[here], self.num_samples, self._key(1 + int(one)))
        return self._sample(self._validation_blocks * self.block + at)

    def validation(self, number: int, rows: Sequence[int]) -> Numbers:
        """Samples in these rows of validation batch `number`; beyond the last it begins again."""
        at = self.number(number, rows) % self.num_validation
        # Shuffled, so that the first few batches come from all over the data.
        at = permute(at, self.num_validation, self._key(0))
        return self.total + at if self.held_out else self._sample(at)

    def first_validation(self, most: int) -> Numbers:
        """The first `most` validation samples, not shuffled."""
        at = np.arange(min(self.num_validation, most), dtype=np.int64)
        return self.total + at if self.held_out else self._sample(at)

    def _key(self, purpose: int) -> int:
        return int(_mix(np.uint64(self.seed))) + purpose

    def _sample(self, place: Numbers) -> Numbers:
        """The sample at each place: validation samples stand first, then training samples."""
        block, inside = np.divmod(place, self.block)
        return permute(block, self._blocks, self._key(-1)) * self.block + inside


class Ordered(ABC, Generic[Read]):
    """Batches of what lies in an order: whoever has one says how its samples are read."""

    if TYPE_CHECKING:

        @property
        def order(self) -> Order: ...

    @abstractmethod
    def _read(self, samples: Numbers) -> Read:
        """The samples of these numbers, as a batch."""

    @property
    def num_samples(self) -> int:
        """Training samples of one epoch."""
        return self.order.num_samples

    @property
    def num_validation(self) -> int:
        return self.order.num_validation

    def train(self, step: int, rows: Sequence[int]) -> Read:
        """Rows of the global batch of `step`. Samples are numbered through all epochs, so a batch may reach over two."""
        return self._read(self.order.train(step, rows))

    def validation(self, number: int, rows: Sequence[int]) -> Read:
        """Rows of validation batch `number`; beyond the last it begins again."""
        return self._read(self.order.validation(number, rows))
