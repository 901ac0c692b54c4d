"""Sequence packing: whole documents are packed into samples of a fixed length by best fit.

A sample of S tokens is a list of pieces of documents (first token, number of tokens); the rest of it is padding.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


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

    >>> [x.tolist() for x in pieces_of(np.array([3, 8]), 2, cut=False)]
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
