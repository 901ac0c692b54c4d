"""Documents to samples of a length: whole, several to a sample, with boundaries. In: where documents end. Out: pieces of samples.

A sample of S tokens is a list of pieces (the first token, how many); what is left of it is padding. S: tokens of a sample.
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
    """Pieces `first[s] <= i < first[s + 1]` are in sample s: tokens `start[i]` to `start[i] + length[i]`."""

    first: Numbers
    start: Numbers
    length: Numbers

    @property
    def num_samples(self) -> int:
        return len(self.first) - 1

    def pieces(self, sample: int) -> list[tuple[int, int]]:
        """(the first token, how many) of each piece of a sample."""
        part = slice(int(self.first[sample]), int(self.first[sample + 1]))
        return list(zip(self.start[part].tolist(), self.length[part].tolist(), strict=True))


def pieces_of(ends: Numbers, sequence: int, cut: bool) -> tuple[Numbers, Numbers]:
    """(start, length) of the pieces of documents that a sample has room for: one after the other, or (`cut`) the first alone.

    >>> [x.tolist() for x in pieces_of(np.array([3, 8]), 2, cut=False)]
    [[0, 2, 3, 5, 7], [2, 1, 2, 2, 1]]
    """
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = ends - starts
    if cut:
        return starts, np.minimum(lengths, sequence)
    counts = -(-lengths // sequence)
    which = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts[which] + number * sequence, np.minimum(sequence, lengths[which] - number * sequence)


def unpacked(start: Numbers, length: Numbers) -> Packing:
    """Every piece a sample of its own."""
    return Packing(np.arange(len(start) + 1), start, length)


def packed(start: Numbers, length: Numbers, sequence: int) -> Packing:
    """Best fit, longest first: each piece goes into the sample with the least room that it fits into (Johnson 1973: at most 11/9 of the
    least number of samples, and 6/9 of one more).

    >>> p = packed(np.array([0, 5, 8]), np.array([5, 3, 2]), 8)
    >>> [p.pieces(s) for s in range(p.num_samples)]
    [[(0, 5), (5, 3)], [(8, 2)]]
    """
    samples: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # that there are samples of, in order
    lengths: Sequence[int] = length.tolist()
    for i in np.argsort(-length, kind="stable").tolist():
        place = bisect_left(rooms, lengths[i])
        if place < len(rooms):
            room = rooms[place]
            sample = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(place)
        else:
            room, sample = sequence, len(samples)
            samples.append([])
        samples[sample].append(i)
        left = room - lengths[i]
        if left:
            if not with_room.setdefault(left, []):
                insort(rooms, left)
            with_room[left].append(sample)
    flat = np.asarray([i for pieces in samples for i in pieces], np.int64)
    first = np.cumsum([0, *map(len, samples)])
    return Packing(first.astype(np.int64), start[flat], length[flat])
