"""Samples in an order that depends on the seed and the step alone. In: tokens, or a batch. Out: batches by step number.

Whatever the layout and however often a run is resumed, step n has the same samples, and every sample comes once an epoch.
B samples a batch, S tokens a sample. Not modelled: samples of different lengths, mixtures of several texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from weft.errors import ConfigError
from weft.train.corpus import FileTokens, Tokens

Batch = Any  # a tensor, or a tuple, list or dict of them; samples in dimension 0
Numbers = npt.NDArray[np.int64]
_ROUNDS = 4
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment
_WINDOWS_PER_BLOCK = 64
_LEAST_BLOCKS = 64


class Source(Protocol):
    """What batches are made of: training batches by step, validation batches by number."""

    @property
    def num_samples(self) -> int: ...

    @property
    def num_validation(self) -> int: ...

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        """Rows `rows` of the global batch of `step`."""
        ...

    def validation(self, number: int, rows: Sequence[int]) -> Batch:
        """Rows `rows` of validation batch `number`."""
        ...


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
class Text:
    """Windows of S + 1 tokens from one text; a batch is (inputs [B, S], targets [B, S]), the targets one token further.

    Windows are laid side by side; whole blocks of them, chosen by the seed, are kept for validation, so that what is
    validated on lies apart from what is trained on, and in all parts of the text.
    """

    tokens: Tokens | FileTokens
    sequence: int
    batch: int
    validation_fraction: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.num_validation < 1:
            need = 2 * self.sequence + 1
            raise ConfigError(
                f"the text has {self.tokens.size} bytes, too few for training and validation samples of sequence = {self.sequence}; "
                f"use at least {need} bytes of text or a shorter sequence"
            )

    @property
    def _windows(self) -> int:
        return (self.tokens.size - 1) // self.sequence

    @property
    def _block(self) -> int:
        """Windows in a block: fewer where the text is short."""
        return max(1, min(_WINDOWS_PER_BLOCK, self._windows // _LEAST_BLOCKS))

    @property
    def _blocks(self) -> int:
        return self._windows // self._block

    @property
    def _validation_blocks(self) -> int:
        return max(1, min(self._blocks - 1, round(self._blocks * self.validation_fraction)))

    @property
    def num_samples(self) -> int:
        """Training samples of one epoch."""
        return (self._blocks - self._validation_blocks) * self._block

    @property
    def num_validation(self) -> int:
        return self._validation_blocks * self._block

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        """Rows of the global batch of `step`. Samples are numbered through all epochs, so a batch may reach over two."""
        number = step * self.batch + np.asarray(rows, np.int64)
        epoch, at = np.divmod(number, self.num_samples)
        for one in np.unique(epoch):
            here = epoch == one
            at[here] = permute(at[here], self.num_samples, self._key(1 + int(one)))
        return self._read(self._window(self._validation_blocks * self._block + at))

    def validation(self, number: int, rows: Sequence[int]) -> Batch:
        """Rows of validation batch `number`; beyond the last it begins again."""
        at = (number * self.batch + np.asarray(rows, np.int64)) % self.num_validation
        # Shuffled, so that the first few batches come from all over the text.
        return self._read(self._window(permute(at, self.num_validation, self._key(0))))

    def validation_tokens(self) -> Tokens:
        """Tokens that are validated on, one sample after the other, of up to 16,384 samples."""
        window = self._window(np.arange(min(self.num_validation, 1 << 14), dtype=np.int64))
        return np.concatenate([self.tokens[w * self.sequence + 1 : (w + 1) * self.sequence + 1] for w in window.tolist()])

    def _key(self, purpose: int) -> int:
        return int(_mix(np.uint64(self.seed))) + purpose

    def _window(self, sample: Numbers) -> Numbers:
        """Window of each sample: validation samples first, then training samples."""
        block, inside = np.divmod(sample, self._block)
        return permute(block, self._blocks, self._key(-1)) * self._block + inside

    def _read(self, window: Numbers) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.tokens[w * self.sequence : (w + 1) * self.sequence + 1] for w in window.tolist()]
        both = torch.from_numpy(np.stack(rows).astype(np.int64))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@dataclass(frozen=True)
class Synthetic:
    """The same batch at every step, for models that come with one."""

    batch: Batch

    @property
    def num_samples(self) -> int:
        return batch_size(self.batch)

    @property
    def num_validation(self) -> int:
        return batch_size(self.batch)

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        return take(self.batch, rows)

    def validation(self, number: int, rows: Sequence[int]) -> Batch:
        return take(self.batch, rows)


def map_tensors(batch: Batch, fn: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """`fn` of every tensor in tuples, lists and dicts; everything else stays."""
    match batch:
        case torch.Tensor():
            return fn(batch)
        case dict():
            return {key: map_tensors(value, fn) for key, value in batch.items()}
        case tuple() if hasattr(batch, "_fields"):
            return type(batch)(*(map_tensors(value, fn) for value in batch))
        case tuple() | list():
            return type(batch)(map_tensors(value, fn) for value in batch)
        case _:
            return batch


def tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """The tensors in tuples, lists and dicts, in order."""
    match batch:
        case torch.Tensor():
            yield batch
        case dict():
            for value in batch.values():
                yield from tensors(value)
        case tuple() | list():
            for value in batch:
                yield from tensors(value)


def batch_size(batch: Batch) -> int:
    """Samples in a batch: rows of its first tensor that has any.

    Raises:
        ConfigError: no tensor with a dimension in it.
    """
    for x in tensors(batch):
        if x.dim():
            return x.shape[0]
    raise ConfigError("the batch holds no tensor with samples in dimension 0; give a tensor, or a tuple or dict of them")


def take(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rows of every tensor that has as many rows as the batch has samples."""
    size, index = batch_size(batch), torch.as_tensor(rows, dtype=torch.int64)
    if len(rows) == size and list(rows) == list(range(size)):
        return batch
    return map_tensors(batch, lambda x: x.index_select(0, index.to(x.device)) if x.dim() and x.shape[0] == size else x)
