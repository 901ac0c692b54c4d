"""The order of samples: a shuffle by a keyed permutation, as a function of the seed and the step alone.

Step n has the same samples in any layout and after any resumption, and every sample is used once an epoch.
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


def permute_indices(index: Numbers, size: int, key: int) -> Numbers:
    """Map each of `index` by a keyed permutation of range(size), without materialising the permutation.

    A Feistel network (Luby and Rackoff, SIAM J. Comput. 1988) over the next even power of two, walked along its cycle until
    the number is below `size` (Black and Rogaway, CT-RSA 2002): any epoch of any corpus in constant memory.

    >>> sorted(permute_indices(np.arange(5), 5, key=1).tolist())
    [0, 1, 2, 3, 4]
    """
    half = max(1, (max(1, size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = [_mix_bits(np.uint64((key + r * _GOLDEN) % 2**64)) for r in range(1, _ROUNDS + 1)]
    value = index.astype(np.uint64)
    out = np.empty(index.shape, np.int64)
    remaining = np.arange(index.size)
    flat, result = value.reshape(-1), out.reshape(-1)
    while remaining.size:
        high, low = flat >> np.uint64(half), flat & mask
        for k in keys:
            high, low = low, high ^ (_mix_bits(low ^ k) & mask)
        flat = high << np.uint64(half) | low
        inside = flat < size
        result[remaining[inside]] = flat[inside].astype(np.int64)
        remaining, flat = remaining[~inside], flat[~inside]
    return out


def _mix_bits(x: Any) -> Any:
    """SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class SampleOrder:
    """The order of `total` samples. Whole blocks of `block` neighbours, chosen by the seed, are held out for validation; or, if
    `num_held_out` is not 0, that many additional samples, numbered after `total`.

    >>> order = SampleOrder(total=10, batch=4, validation_fraction=0.2, seed=0)
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
    num_held_out: int = 0

    @property
    def _num_blocks(self) -> int:
        return self.total // self.block

    @property
    def _num_validation_blocks(self) -> int:
        return 0 if self.num_held_out else max(1, min(self._num_blocks - 1, round(self._num_blocks * self.validation_fraction)))

    @property
    def num_samples(self) -> int:
        """Number of training samples of one epoch."""
        return (self._num_blocks - self._num_validation_blocks) * self.block

    @property
    def num_validation(self) -> int:
        return self.num_held_out or self._num_validation_blocks * self.block

    def sample_numbers(self, step: int, rows: Sequence[int]) -> Numbers:
        """Return the numbers of a step's rows, counted through all epochs."""
        return step * self.batch + np.asarray(rows, np.int64)

    def train(self, step: int, rows: Sequence[int]) -> Numbers:
        """Return the samples in these rows of the global batch of `step`, which may span two epochs."""
        epochs, at = np.divmod(self.sample_numbers(step, rows), self.num_samples)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            at[in_epoch] = permute_indices(at[in_epoch], self.num_samples, self._key(1 + int(epoch)))
        return self._sample(self._num_validation_blocks * self.block + at)

    def validation(self, number: int, rows: Sequence[int]) -> Numbers:
        """Return the samples in these rows of validation batch `sample_numbers`, which wraps around."""
        at = self.sample_numbers(number, rows) % self.num_validation
        # Shuffled, so that the first few batches are from all over the data.
        at = permute_indices(at, self.num_validation, self._key(0))
        return self.total + at if self.num_held_out else self._sample(at)

    def first_validation(self, limit: int) -> Numbers:
        """Return the first `limit` validation samples, not shuffled."""
        at = np.arange(min(self.num_validation, limit), dtype=np.int64)
        return self.total + at if self.num_held_out else self._sample(at)

    def _key(self, purpose: int) -> int:
        return int(_mix_bits(np.uint64(self.seed))) + purpose

    def _sample(self, position: Numbers) -> Numbers:
        """Return the sample at each position: validation samples come first, then training samples."""
        block, inside = np.divmod(position, self.block)
        return permute_indices(block, self._num_blocks, self._key(-1)) * self.block + inside


class OrderedSource(ABC, Generic[Read]):
    """Batches of samples in an order; a subclass reads the samples."""

    if TYPE_CHECKING:

        @property
        def order(self) -> SampleOrder: ...

    @abstractmethod
    def _read(self, samples: Numbers) -> Read:
        """Read the samples of these numbers as a batch."""

    @property
    def num_samples(self) -> int:
        """Number of training samples of one epoch."""
        return self.order.num_samples

    @property
    def num_validation(self) -> int:
        return self.order.num_validation

    def train(self, step: int, rows: Sequence[int]) -> Read:
        """Return rows of the global batch of `step`, which may span two epochs."""
        return self._read(self.order.train(step, rows))

    def validation(self, number: int, rows: Sequence[int]) -> Read:
        """Return rows of validation batch `sample_numbers`, which wraps around."""
        return self._read(self.order.validation(number, rows))
