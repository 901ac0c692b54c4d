"""Where a rank's block of a tensor lies in the whole, of which a dimension may be cut into pieces of several runs.

In: by dimension the ranges of the whole that the rank has, one behind the other in its block. Out: the block of a whole tensor, and the
boxes that it is made of, as pieces for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor

from weft.plan.placement import Range, Shard
from weft.run.state.checkpoint import Piece
from weft.run.state.checkpoint.piece import Kind
from weft.run.state.checkpoint.region import Box, Region

Spans = tuple[tuple[Range, ...], ...]


def full_spans(shape: Sequence[int]) -> Spans:
    """Of a block that is the whole tensor."""
    return tuple(((0, size),) for size in shape)


def cut_again(spans: Spans, form: Shard, n: int, index: int) -> Spans:
    """Of a block of which rank `index` of n has a part.

    >>> from weft.plan.placement import Shard, in_runs
    >>> cut_again(full_spans((6, 4)), in_runs(0, ((2, 2), (1, 1))), 2, 1), cut_again((((2, 6),),), Shard(0), 2, 1)
    ((((2, 4), (5, 6)), ((0, 4),)), (((4, 6),),))
    """
    (first, last), *others = spans[form.dim]
    if others:
        raise AssertionError(f"dimension {form.dim} lies in {len(others) + 1} places, and is cut once more")
    mine = tuple((first + start, first + stop) for start, stop in form.spans(last - first, n, index))
    return (*spans[: form.dim], mine, *spans[form.dim + 1 :])


def shape_of(spans: Spans) -> tuple[int, ...]:
    """Of the block."""
    return tuple(sum(stop - start for start, stop in of) for of in spans)


def block_of(x: Tensor, spans: Spans) -> Tensor:
    """The block of a whole tensor: a view where it lies in one place."""
    for dim, of in enumerate(spans):
        parts = [x.narrow(dim, start, stop - start) for start, stop in of]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def boxes_of(spans: Spans) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Boxes of the whole that a block is made of, each with where it begins in the block."""
    begins = [[0, *accumulate(stop - start for start, stop in of)] for of in spans]
    for places in product(*(range(len(of)) for of in spans)):
        ranges = [of[i] for of, i in zip(spans, places, strict=True)]
        offsets, sizes = tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges)
        yield Box(offsets, sizes), tuple(begin[i] for begin, i in zip(begins, places, strict=True))


def pieces_at(
    name: str,
    kind: Kind,
    global_shape: tuple[int, ...],
    spans: Spans,
    x: Tensor,
    slot: str = "",
    owner: bool = True,
    flat: Range | None = None,
) -> list[Piece]:
    """A block, or with `flat` these of its elements in row-major order, as pieces of the whole that share its memory: one where it lies in
    one place, else one for each box of it."""
    shape = shape_of(spans)
    if all(len(of) == 1 for of in spans):
        return [Piece(name, kind, global_shape, tuple(start for ((start, _),) in spans), x, slot, owner, shape, flat)]
    pieces = []
    for box, begin in Region(shape, (0,) * len(shape), shape, flat).boxes():
        part = x if flat is None else x[begin : begin + box.size].view(box.shape)
        for there, start in boxes_of(spans):
            common = box.intersect(Box(start, there.shape))
            if common is not None:
                offsets = tuple(a + b - c for a, b, c in zip(there.offsets, common.offsets, start, strict=True))
                pieces.append(Piece(name, kind, global_shape, offsets, part[box.slices_of(common)], slot, owner))
    return pieces
