"""Global index ranges of a rank's block of a sharded tensor, where a shard of a dimension may consist of several ranges.

In: for each dimension the global ranges that the rank has, concatenated in its block. Out: the block of a full tensor, and its boxes as
shards for checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor

from shardwise.plan.ir.placement import Range, Shard
from shardwise.run.checkpoint import StateShard
from shardwise.run.checkpoint.region import BlockRegion, TensorBox
from shardwise.run.checkpoint.state_shard import StateKind

BlockRanges = tuple[tuple[Range, ...], ...]


def full_ranges(shape: Sequence[int]) -> BlockRanges:
    """Return the ranges of a block that is the full tensor."""
    return tuple(((0, size),) for size in shape)


def shard_block(spans: BlockRanges, placement: Shard, num_shards: int, index: int) -> BlockRanges:
    """Shard a block once more: return the ranges of rank `index` of n.

    >>> from shardwise.plan.ir.placement import Shard, shard_of_runs
    >>> shard_block(full_ranges((6, 4)), shard_of_runs(0, ((2, 2), (1, 1))), 2, 1), shard_block((((2, 6),),), Shard(0), 2, 1)
    ((((2, 4), (5, 6)), ((0, 4),)), (((4, 6),),))
    """
    (first, last), *more_ranges = spans[placement.dim]
    if more_ranges:
        raise AssertionError(f"dimension {placement.dim} has {len(more_ranges) + 1} ranges, and cannot be sharded again")
    local_ranges = tuple((first + start, first + stop) for start, stop in placement.spans(last - first, num_shards, index))
    return (*spans[: placement.dim], local_ranges, *spans[placement.dim + 1 :])


def block_shape(spans: BlockRanges) -> tuple[int, ...]:
    """Return the shape of the block."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in spans)


def block_of(x: Tensor, spans: BlockRanges) -> Tensor:
    """Return the block of a full tensor: a view if it is contiguous in every dimension."""
    for dim, ranges in enumerate(spans):
        parts = [x.narrow(dim, start, stop - start) for start, stop in ranges]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def boxes_of(spans: BlockRanges) -> Iterator[tuple[TensorBox, tuple[int, ...]]]:
    """Yield the global boxes that a block consists of, each with its offset in the block."""
    starts = [[0, *accumulate(stop - start for start, stop in dim_ranges)] for dim_ranges in spans]
    for indices in product(*(range(len(dim_ranges)) for dim_ranges in spans)):
        ranges = [dim_ranges[i] for dim_ranges, i in zip(spans, indices, strict=True)]
        offsets, sizes = tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges)
        yield TensorBox(offsets, sizes), tuple(dim_starts[i] for dim_starts, i in zip(starts, indices, strict=True))


def shards_at(
    name: str,
    kind: StateKind,
    global_shape: tuple[int, ...],
    spans: BlockRanges,
    x: Tensor,
    slot: str = "",
    is_owner: bool = True,
    flat: Range | None = None,
) -> list[StateShard]:
    """Return a block, or with `flat` these of its elements in row-major order, as shards that share its memory: one for each box of it."""
    shape = block_shape(spans)
    if all(len(ranges) == 1 for ranges in spans):
        return [StateShard(name, kind, global_shape, tuple(start for ((start, _),) in spans), x, slot, is_owner, shape, flat)]
    shards = []
    for box, begin in BlockRegion(shape, (0,) * len(shape), shape, flat).boxes():
        part = x if flat is None else x[begin : begin + box.size].view(box.shape)
        for global_box, start in boxes_of(spans):
            common = box.intersect(TensorBox(start, global_box.shape))
            if common is not None:
                offsets = tuple(a + b - c for a, b, c in zip(global_box.offsets, common.offsets, start, strict=True))
                shards.append(StateShard(name, kind, global_shape, offsets, part[box.index_of(common)], slot, is_owner))
    return shards
