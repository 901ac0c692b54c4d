"""Batches by step number: windows of text, a synthetic batch, and helpers for nested batches of tensors.

Step n has the same samples in any layout and after any resumption, and every sample is used once an epoch.
Shapes: B samples a batch, S tokens a sample. Not modelled: mixtures of several texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from shardwise.capture.nesting import map_tensors, tensors_in
from shardwise.errors import ConfigError
from shardwise.train.data.reading.token_files import FileTokens, Tokens
from shardwise.train.data.sample_order import Numbers, OrderedSource, SampleOrder

Batch = Any  # a tensor, or a tuple, list or dict of them; samples in dimension 0
IGNORED_LABEL = -100  # label that losses ignore
_WINDOWS_PER_BLOCK = 64
_LEAST_BLOCKS = 64


class BatchSource(Protocol):
    """A source of batches: training batches by step, validation batches by number."""

    @property
    def num_samples(self) -> int: ...

    @property
    def num_validation(self) -> int: ...

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        """Return rows `rows` of the global batch of `step`."""
        ...

    def validation(self, number: int, rows: Sequence[int]) -> Batch:
        """Return rows `rows` of validation batch `number`."""
        ...


class TextRows(NamedTuple):
    """Rows of text: `inputs` BS; `targets` BS, the next token of each; `labels` BS, the inputs themselves; `positions` BS within each
    document if samples hold several. Tokens without loss are -100 in targets and labels."""

    inputs: torch.Tensor
    targets: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor | None = None


@dataclass(frozen=True)
class TextWindows(OrderedSource[TextRows]):
    """Windows of S + 1 tokens from one text.

    Windows do not overlap; whole blocks of them, chosen by the seed, are held out for validation, so that validation and training text are
    separate and both from all over the text. `loss_mask`: a byte a token, 0 if the token is no target.
    """

    tokens: Tokens | FileTokens
    sequence: int
    batch: int
    validation_fraction: float = 0.05
    seed: int = 0
    loss_mask: Tokens | FileTokens | None = None

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.num_validation < 1:
            need = 2 * self.sequence + 1
            raise ConfigError(
                f"the text has {self.tokens.size} tokens, too few for training and validation samples of sequence = {self.sequence}; "
                f"use at least {need} tokens of text or a shorter sequence"
            )

    @property
    def order(self) -> SampleOrder:
        """The order of the windows, in blocks that are held out together, smaller if the text is short."""
        windows = (self.tokens.size - 1) // self.sequence
        block = max(1, min(_WINDOWS_PER_BLOCK, windows // _LEAST_BLOCKS))
        return SampleOrder(windows, self.batch, self.validation_fraction, self.seed, block)

    def validation_tokens(self) -> Tokens:
        """Return the concatenated validation tokens, of up to 16,384 samples."""
        windows = self.order.first_validation(1 << 14).tolist()
        return np.concatenate([self.tokens[w * self.sequence + 1 : (w + 1) * self.sequence + 1] for w in windows])

    def _read(self, window: Numbers) -> TextRows:
        ids = self._rows(self.tokens, window)
        labels = ids if self.loss_mask is None else ids.masked_fill(self._rows(self.loss_mask, window) == 0, IGNORED_LABEL)
        return TextRows(*(x.contiguous() for x in (ids[:, :-1], labels[:, 1:], labels[:, :-1])))

    def _rows(self, tokens: Tokens | FileTokens, window: Numbers) -> torch.Tensor:
        rows = [tokens[w * self.sequence : (w + 1) * self.sequence + 1] for w in window.tolist()]
        return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass(frozen=True)
class SyntheticSource:
    """The same batch at every step, for models that come with one."""

    batch: Batch

    @property
    def num_samples(self) -> int:
        return batch_size(self.batch)

    @property
    def num_validation(self) -> int:
        return batch_size(self.batch)

    def train(self, step: int, rows: Sequence[int]) -> Batch:
        return take_rows(self.batch, rows)

    def validation(self, number: int, rows: Sequence[int]) -> Batch:
        return take_rows(self.batch, rows)


def batch_entries(batch: Batch) -> list[tuple[Any, Any]]:
    """Return (name or position, value) of a dict, a tuple or a list; nothing for a single tensor."""
    return list(batch.items() if isinstance(batch, dict) else enumerate(batch)) if isinstance(batch, dict | tuple | list) else []


def batch_from_entries(values: dict[Any, Any]) -> Batch:
    """Build the batch with these entries: a dict by name, or a tuple by position.

    >>> batch_from_entries({1: "labels", 0: "pixels"}), batch_from_entries({"x": 1})
    (('pixels', 'labels'), {'x': 1})
    """
    return tuple(values[position] for position in sorted(values)) if 0 in values else values


def batch_size(batch: Batch) -> int:
    """Number of samples in a batch: rows of its first tensor that has dimensions.

    Raises:
        ConfigError: no such tensor.
    """
    for x in tensors_in(batch):
        if x.dim():
            return x.shape[0]
    raise ConfigError("the batch holds no tensor with samples in dimension 0; give a tensor, or a tuple or dict of them")


def take_rows(batch: Batch, rows: Sequence[int]) -> Batch:
    """Select rows of every tensor that has as many rows as the batch has samples."""
    size, index = batch_size(batch), torch.as_tensor(rows, dtype=torch.int64)
    if len(rows) == size and list(rows) == list(range(size)):
        return batch
    return map_tensors(batch, lambda x: x.index_select(0, index.to(x.device)) if x.dim() and x.shape[0] == size else x)
