"""Rank groups of mesh axes: size and stride, and rank distances of pipeline stages, from a layout.

The last axis varies fastest: its ranks are neighbours, the stride of the axis before is its size, and so on. Not modelled:
groups of unequal strides, which arise from axes that are not adjacent; they count as evenly spread over their span.
"""

from __future__ import annotations

from functools import lru_cache

from shardwise.cluster.cluster import Cluster
from shardwise.cost.network.network import RankGroup
from shardwise.plan.layout import Layout


def group_of(layout: Layout, *axes: str) -> RankGroup:
    """Return the group of ranks along `axes` of the mesh.

    >>> layout = Layout.parse("data=2 tensor=2x4")
    >>> [(g.size, g.stride) for g in (group_of(layout, axis) for axis in ("columns", "rows", "data"))]
    [(4, 1), (2, 4), (2, 8)]
    """
    size = stride = distance = span = 1
    for axis, axis_size in reversed(layout.axes):
        if axis in axes and axis_size > 1:
            stride = distance if size == 1 else stride
            size, span = size * axis_size, distance * axis_size
        distance *= axis_size
    return RankGroup(size, max(stride, span // size), layout.num_ranks)


def stage_rank_distance(cluster: Cluster, layout: Layout, here: int, there: int) -> int:
    """Return the largest rank distance between two pipeline ranks: if some peers are on two nodes, the distance of those.
    Not modelled: stages across a node's end, of which all ranks count as sending between nodes.

    >>> four, near, wide = Cluster.parse("4xperlmutter"), "data=2 pipeline=8 neighbours=pipeline", "data=2 pipeline=8"
    >>> [[stage_rank_distance(four, Layout.parse(text), s, s + 1) for s in range(4)] for text in (near, wide)]
    [[1, 1, 1, 4], [2, 4, 2, 4]]
    """
    return _cached_stage_rank_distance(
        tuple([level.size for level in cluster.levels]), layout.stage_stride, layout.pipeline, layout.num_ranks, here, there
    )


def rank_distance(cluster: Cluster, first: int, last: int) -> int:
    """Return the distance of two ranks: 1 if they share the innermost unit, else the size of the largest unit that separates them.

    >>> four = Cluster.parse("4xperlmutter")
    >>> [rank_distance(four, 0, last) for last in (3, 4)]
    [1, 4]
    """
    below = unit = 1
    for level in cluster.levels:
        below, unit = unit, unit * level.size
        if first // unit == last // unit:
            break
    return below


@lru_cache(maxsize=65536)
def _cached_stage_rank_distance(sizes: tuple[int, ...], stride: int, pipeline: int, num_ranks: int, here: int, there: int) -> int:
    span, unit, below = stride * pipeline, 1, 1
    for size in sizes:
        below, unit = unit, unit * size
        aligned = span % unit == 0 or unit % span == 0 or span == num_ranks
        if aligned and all((here * stride + r) // unit == (there * stride + r) // unit for r in (0, stride - 1)):
            break
    return max(stride, below)
