"""Regions of a global tensor as boxes. In: a global shape, a block of it and optionally a flat range of that block. Out: boxes.

A row-major flat range of an n-dimensional block is at most 2n - 1 boxes, so that resharding between any two layouts is an intersection
of boxes. Not modelled: strided regions (every second row).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorBox:
    """An axis-parallel box in a tensor: first index and extent per dim, in global indices."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def intersect(self, other: TensorBox) -> TensorBox | None:
        """Return the intersection, None if it is empty."""
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True))
        shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return TensorBox(starts, shape) if all(n > 0 for n in shape) else None

    def index_of(self, part: TensorBox) -> tuple[slice, ...]:
        """Return the index of `part`, a box inside this one, in a tensor that holds just this box."""
        return tuple(slice(p - o, p - o + n) for p, o, n in zip(part.offsets, self.offsets, part.shape, strict=True))


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """A block of a global tensor, or the elements `flat[0] <= i < flat[1]` of that block in row-major order.

    Raises:
        CheckpointError: the block leaves the global tensor, or the range leaves the block.

    >>> [box for box, _ in BlockRegion((4, 3), (2, 0), (2, 3), (1, 4)).boxes()]
    [TensorBox(offsets=(2, 1), shape=(1, 2)), TensorBox(offsets=(3, 0), shape=(1, 1))]
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    flat: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offsets) == len(self.shape):
            raise CheckpointError(f"a block at {list(self.offsets)} of {list(self.shape)} is no part of {list(self.global_shape)}")
        for size, first, extent in zip(self.global_shape, self.offsets, self.shape, strict=True):
            if first < 0 or extent < 0 or first + extent > size:
                raise CheckpointError(
                    f"a block of {list(self.shape)} at {list(self.offsets)} leaves its tensor of {list(self.global_shape)}"
                )
        if self.flat is not None and not 0 <= self.flat[0] <= self.flat[1] <= prod(self.shape):
            raise CheckpointError(f"flat range {list(self.flat)} leaves its block of {prod(self.shape)} elements")

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape) if self.flat is None else self.flat[1] - self.flat[0]

    def boxes(self) -> Iterator[tuple[TensorBox, int]]:
        """Yield boxes in row-major order, each with its first element in the region's own storage."""
        start, stop = self.flat or (0, prod(self.shape))
        begin = 0
        for box in _boxes_of_range(self.shape, start, stop):
            yield TensorBox(tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)), box.shape), begin
            begin += box.size


def _boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBox]:
    """Yield the boxes of elements `start <= i < stop` of a row-major tensor, in order."""
    if start >= stop:
        return
    if not shape:
        yield TensorBox((), ())
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows first..last-1
    if first > last:  # inside one row
        yield from _in_row(last, shape[1:], start - last * row, stop - last * row)
        return
    yield from _in_row(first - 1, shape[1:], start - (first - 1) * row, row)
    if first < last:
        yield TensorBox((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(last, shape[1:], 0, stop - last * row)


def _in_row(index: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[TensorBox]:
    for box in _boxes_of_range(shape, start, stop):
        yield TensorBox((index, *box.offsets), (1, *box.shape))


def coverage_fault(global_shape: tuple[int, ...], regions: Sequence[BlockRegion]) -> str:
    """Return why `regions` do not cover a tensor exactly once (missing elements or overlapping boxes); empty if they do."""
    boxes = [box for region in regions for box, _ in region.boxes()]
    covered = sum(box.size for box in boxes)
    if covered != prod(global_shape):
        return f"{covered} of {prod(global_shape)} elements are there"
    # Sorted by first row: the inner loop ends at the first box that begins after this one.
    boxes.sort(key=lambda box: box.offsets)
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if box.offsets and other.offsets[0] >= box.offsets[0] + box.shape[0]:
                break
            if box.intersect(other):
                return f"{box.shape} at {box.offsets} and {other.shape} at {other.offsets} overlap"
    return ""
