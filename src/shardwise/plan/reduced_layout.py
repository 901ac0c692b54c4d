"""Reduce a layout to few ranks that do what its ranks do: two along every axis, which is what a proof of any scale runs.

In: a layout. Out: a smaller one with the same axes and choices, and by axis the sizes before and after. A rank's program depends on the
size of an axis only through bounds of slices, members of collectives and factors 1/n, which are written once for every n.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from shardwise.errors import LayoutError
from shardwise.plan.ir.schedule_sizes import limits_of_schedule
from shardwise.plan.layout import Layout

AXES = ("tensor", "context", "channel", "expert", "branch")


def reduce_size(size: int, smallest: int = 2) -> int:
    """Return the size of an axis in the proof: 1 stays 1, any other becomes `smallest`, or itself where it is less.

    >>> [reduce_size(n) for n in (1, 2, 8)], reduce_size(8, 3)
    ([1, 2, 2], 3)
    """
    return min(size, smallest)


def reduce_layout(layout: Layout, smallest: int = 2) -> Layout:
    """Return the layout with every axis of at most `smallest` ranks.

    Raises:
        LayoutError: its ranks are unlike (`inner`, `shares`), or its schedule is a file, which is for one number of ranks.

    >>> str(reduce_layout(Layout.parse("data=128 tensor=8 pipeline=16 microbatches=16 zero=1")))
    'data=2 tensor=2 pipeline=2 microbatches=4 zero=1'
    """
    if layout.inner or layout.shares or layout.actions or layout.collective:
        raise LayoutError(f"{layout} has ranks unlike one another, or a file for as many ranks; prove it as it is, without reducing it")
    expert = reduce_size(layout.expert, smallest)
    data = expert * reduce_size(layout.data // layout.expert, smallest)
    pipeline = reduce_size(layout.pipeline, smallest)
    microbatches = min(layout.microbatches, 2 * pipeline)
    multiple = limits_of_schedule(layout.schedule).microbatch_multiple
    spatial, grid = ("x".join(str(reduce_size(n, smallest)) for n in _sizes_of(text)) for text in (layout.spatial, layout.grid))
    tensor = prod(_sizes_of(grid)) if grid else reduce_size(layout.tensor, smallest)
    return replace(
        layout,
        data=data,
        tensor=tensor,
        grid=grid,
        pipeline=pipeline,
        expert=expert,
        spatial=spatial,
        context=reduce_size(layout.context, smallest),
        channel=reduce_size(layout.channel, smallest),
        branch=reduce_size(layout.branch, smallest),
        microbatches=-(-microbatches // multiple) * multiple,
        chunks=min(layout.chunks, 2),
        recompute=_residency_kind_of(layout.recompute),
        offload=_residency_kind_of(layout.offload),
    )


def divisors_of(layout: Layout, reduced: Layout) -> tuple[tuple[int, int], ...]:
    """Return (size before, size after) of every axis inside a replica, along which dimensions of tensors are divided."""
    pairs = [(getattr(layout, axis), getattr(reduced, axis)) for axis in AXES]
    for before, after in ((layout.spatial, reduced.spatial), (layout.grid, reduced.grid)):
        pairs += zip(_sizes_of(before), _sizes_of(after), strict=True)
    return tuple(dict.fromkeys(pair for pair in pairs if pair[0] > 1))


def reduce_batch(batch: int, layout: Layout, reduced: Layout) -> int:
    """Return a batch that the reduced layout divides as the layout divides its own: two samples a microbatch, unequal ones unequal.

    `batch`: 0 for any that divides."""
    parts = layout.data * layout.context * layout.microbatches
    size = 2 * reduced.data * reduced.microbatches
    return size if batch % parts == 0 or batch % (layout.data * layout.microbatches) == 0 else size + 1


def _residency_kind_of(residency: str) -> str:
    """Return the kind of a residency that lists layers, for all layers."""
    return residency.partition(":")[0]


def _sizes_of(text: str) -> list[int]:
    return [int(word) for word in text.split("x") if word]
