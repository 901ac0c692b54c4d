"""Where the ranks of a layout's mesh axes lie on the links. In: a layout, axes by name. Out: the `Group` that talks along them.

The last axis varies fastest: its ranks are neighbours, those of the one before lie as far apart as it has ranks, and so on. Not modelled:
groups of unequal strides, which arise where axes between those named are left out; they count as evenly spread over what they span.
"""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.cost.network.network import Group
from weft.plan.axis import PIPELINE
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
    """How far apart the ranks of two places of a pipeline are, at the most: where these are neighbours, a few lie on two nodes, as far
    apart as the nodes are. Not modelled: the same of stages that are smaller than a node and not their replicas' neighbours, all of
    whose borders count as those inside of nodes.

    >>> four = Cluster.parse("4xperlmutter")
    >>> [stages_apart(four, Layout.parse(f"data=2 pipeline=8 neighbours={near}"), 1, 2) for near in ("branch", "pipeline")]
    [4, 1]
    """
    stride, span, unit = layout.stage_stride, layout.stage_stride * layout.pipeline, 1
    if layout.neighbours != PIPELINE:
        return stride
    for level in cluster.levels:
        below, unit = unit, unit * level.size
        whole = span % unit == 0 or unit % span == 0 or span == layout.num_ranks
        if whole and all((here * stride + r) // unit == (there * stride + r) // unit for r in (0, stride - 1)):
            return max(stride, below)
    return max(stride, below)
