"""Batches of packed documents: several whole documents a sample, padded, with positions that mark their boundaries.

Shapes: B samples a batch, S tokens a sample. The packing algorithm is in `reading/packing`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shardwise.errors import ConfigError
from shardwise.train.data.reading.packing import Packing, one_piece_per_sample, pack_best_fit, pieces_of
from shardwise.train.data.reading.token_files import TokenStore
from shardwise.train.data.sample_order import Numbers, OrderedSource, SampleOrder
from shardwise.train.data.sources import IGNORED_LABEL, TextRows


@dataclass(frozen=True)
class PackedText(OrderedSource[TextRows]):
    """`resets_positions`: samples hold several documents, and positions restart at each. A document's first token is no label."""

    store: TokenStore
    packing: Packing
    order: SampleOrder
    sequence: int
    resets_positions: bool

    def __post_init__(self) -> None:
        if self.order.num_samples < 1 or self.order.num_validation < 1:
            raise ConfigError(
                f"the data makes {self.packing.num_samples} samples of {self.sequence} tokens; training and validation need at least one "
                "each, so give more documents or a shorter sequence"
            )

    def _read(self, samples: Numbers) -> TextRows:
        shape = (len(samples), self.sequence)
        inputs, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED_LABEL, np.int64)
        positions = np.zeros(shape, np.int64)
        for row, sample in enumerate(samples.tolist()):
            at = 0
            for start, length in self.packing.pieces(sample):
                part = slice(at, at + length)
                inputs[row, part] = self.store.tokens[start : start + length]
                labels[row, part] = inputs[row, part]
                if self.store.loss_mask is not None:
                    labels[row, part][self.store.loss_mask[start : start + length] == 0] = IGNORED_LABEL
                labels[row, at] = IGNORED_LABEL
                positions[row, part] = np.arange(length)
                at += length
            positions[row, at:] = np.arange(self.sequence - at)  # padding is a document of its own
        targets = np.full(shape, IGNORED_LABEL, np.int64)
        targets[:, :-1] = labels[:, 1:]
        marked = torch.from_numpy(positions) if self.resets_positions else None
        return TextRows(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(labels), marked)


def packed_text(store: TokenStore, sequence: int, batch: int, validation_fraction: float, seed: int, *, shares_samples: bool) -> PackedText:
    """Make samples of S tokens from documents: several in one if `shares_samples`, else one each. Instruction data are truncated to S.

    Text, whose tokens all have a loss, is split into several pieces instead.
    """
    is_text = store.loss_mask is None
    start, length = pieces_of(store.ends, sequence, truncates=not is_text)
    packing = pack_best_fit(start, length, sequence) if shares_samples else one_piece_per_sample(start, length)
    return PackedText(store, packing, SampleOrder(packing.num_samples, batch, validation_fraction, seed), sequence, shares_samples)
