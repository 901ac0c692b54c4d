"""Batches of packed documents: several whole documents a sample, by best fit, padded, with positions that mark their boundaries.

Shapes: B samples a batch, S tokens a sample. A sample is a list of pieces of documents (first token, number of tokens); the rest of it is
padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.errors import ConfigError
from shardwise.train.data.reading.token_files import TokenStore
from shardwise.train.data.sample_order import Numbers, OrderedSource, SampleOrder
from shardwise.train.data.sources import IGNORED_LABEL, TextRows


@dataclass(frozen=True)
class Packing:
    """Pieces `first[s] <= i < first[s + 1]` are in sample s; piece i is tokens `start[i]` to `start[i] + length[i]`."""

    first: Numbers
    start: Numbers
    length: Numbers

    @property
    def num_samples(self) -> int:
        return len(self.first) - 1

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        """Return (first token, number of tokens) of each piece of a sample."""
        part = slice(int(self.first[sample]), int(self.first[sample + 1]))
        return list(zip(self.start[part].tolist(), self.length[part].tolist(), strict=True))


def pieces_of(ends: Numbers, sequence: int, truncates: bool) -> tuple[Numbers, Numbers]:
    """Split documents into pieces that fit into a sample, as (start, length); with `truncates` only the first piece of each.

    >>> [x.tolist() for x in pieces_of(np.array([3, 8]), 2, truncates=False)]
    [[0, 2, 3, 5, 7], [2, 1, 2, 2, 1]]
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = ends - starts
    if truncates:
        return starts, np.minimum(lengths, sequence)
    counts = -(-lengths // sequence)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[document] + number * sequence, np.minimum(sequence, lengths[document] - number * sequence)


def one_piece_per_sample(start: Numbers, length: Numbers) -> Packing:
    """Put every piece into its own sample."""
    return Packing(np.arange(len(start) + 1), start, length)


def pack_best_fit(start: Numbers, length: Numbers, sequence: int) -> Packing:
    """Pack by best fit, longest first: each piece goes into the fullest sample that it fits into (Johnson 1973: at most 11/9 of the
    least number of samples, plus 6/9).

    >>> p = pack_best_fit(np.array([0, 5, 8]), np.array([5, 3, 2]), 8)
    >>> [p.pieces(s) for s in range(p.num_samples)]
    [[(0, 5), (5, 3)], [(8, 2)]]
    """
    samples: list[list[int]] = []
    samples_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # distinct free spaces of samples, ascending
    lengths: Sequence[int] = length.tolist()
    for i in np.argsort(-length, kind="stable").tolist():
        index = bisect_left(spaces, lengths[i])
        if index < len(spaces):
            space = spaces[index]
            sample = samples_by_space[space].pop()
            if not samples_by_space[space]:
                spaces.pop(index)
        else:
            space, sample = sequence, len(samples)
            samples.append([])
        samples[sample].append(i)
        space -= lengths[i]
        if space:
            if not samples_by_space.setdefault(space, []):
                insort(spaces, space)
            samples_by_space[space].append(sample)
    flat = np.asarray([i for pieces in samples for i in pieces], np.int64)
    first = np.cumsum([0, *map(len, samples)])
    return Packing(first.astype(np.int64), start[flat], length[flat])


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
