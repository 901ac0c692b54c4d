"""Where the ranks of a layout's mesh axes lie on the links. In: a layout, axes by name. Out: the `Group` that talks along them.

The last axis varies fastest: its ranks are neighbours, those of the one before lie as far apart as it has ranks, and so on. Not modelled:
groups of unequal strides, which arise where axes between those named are left out; they count as evenly spread over what they span.
"""

from __future__ import annotations

from functools import lru_cache

from weft.cluster.cluster import Cluster
from weft.cost.network.network import Group
from weft.plan.layout import Layout


def group_of(layout: Layout, *axes: str) -> Group:
    """Ranks along `axes` of the mesh.

    >>> layout = Layout.parse("data=2 tensor=2x4")
    >>> [(g.size, g.stride) for g in (group_of(layout, axis) for axis in ("columns", "rows", "data"))]
    [(4, 1), (2, 4), (2, 8)]
    """
    size = stride = at = span = 1
    for axis, n in reversed(layout.axes):
        if axis in axes and n > 1:
            stride = at if size == 1 else stride
            size, span = size * n, at * n
        at *= n
    return Group(size, max(stride, span // size), layout.num_ranks)


def stages_apart(cluster: Cluster, layout: Layout, here: int, there: int) -> int:
    """How far apart the ranks of two places of a pipeline are, at the most: where some lie on two nodes, as far apart as these are.
    Not modelled: stages across a node's end, of which all ranks count as sending between nodes.

    >>> four, near, wide = Cluster.parse("4xperlmutter"), "data=2 pipeline=8 neighbours=pipeline", "data=2 pipeline=8"
    >>> [[stages_apart(four, Layout.parse(text), s, s + 1) for s in range(4)] for text in (near, wide)]
    [[1, 1, 1, 4], [2, 4, 2, 4]]
    """
    return _apart(tuple([level.size for level in cluster.levels]), layout.stage_stride, layout.pipeline, layout.num_ranks, here, there)


def ranks_apart(cluster: Cluster, first: int, last: int) -> int:
    """How far apart two ranks lie: 1 where they share the innermost unit, and otherwise as far as those of different units.

    >>> four = Cluster.parse("4xperlmutter")
    >>> [ranks_apart(four, 0, last) for last in (3, 4)]
    [1, 4]
    """
    below = unit = 1
    for level in cluster.levels:
        below, unit = unit, unit * level.size
        if first // unit == last // unit:
            break
    return below


@lru_cache(maxsize=65536)
def _apart(sizes: tuple[int, ...], stride: int, pipeline: int, num_ranks: int, here: int, there: int) -> int:
    span, unit, below = stride * pipeline, 1, 1
    for size in sizes:
        below, unit = unit, unit * size
        aligned = span % unit == 0 or unit % span == 0 or span == num_ranks
        if aligned and all((here * stride + r) // unit == (there * stride + r) // unit for r in (0, stride - 1)):
            break
    return max(stride, below)
