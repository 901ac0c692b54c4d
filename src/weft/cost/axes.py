"""Where the ranks of a layout's mesh axes lie on the links. In: a layout, axes by name. Out: the `Group` that talks along them, and what
placing operators over an axis is weighed by.

The last axis varies fastest: its ranks are neighbours, those of the one before lie as far apart as it has ranks, and so on. Not modelled:
groups of unequal strides, which arise where axes between those named are left out; they count as evenly spread over what they span.
"""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.cost.network import Group, collective_s
from weft.model.sharding import Prices
from weft.plan.layout import Layout


def group_of(layout: Layout, *axes: str) -> Group:
    """Ranks along `axes` of the mesh; "expert" are neighbours among the data replicas, and "replicas" are those of one expert.

    >>> layout = Layout.parse("data=2 tensor=2x4")
    >>> [(g.size, g.stride) for g in (group_of(layout, axis) for axis in ("columns", "rows", "data"))]
    [(4, 1), (2, 4), (2, 8)]
    """
    if "expert" in axes:
        return Group(layout.expert, layout.tensor, layout.num_ranks)
    if "replicas" in axes:
        return Group(layout.data // layout.expert, layout.tensor * layout.expert, layout.num_ranks)
    size = stride = at = span = 1
    for axis, n in reversed(layout.axes):
        if axis in axes and n > 1:
            stride = at if size == 1 else stride
            size, span = size * n, at * n
        at *= n
    return Group(size, max(stride, span // size), layout.num_ranks)


def prices_of(cluster: Cluster, layout: Layout, repeats: float) -> dict[str, Prices]:
    """By axis with more than one tensor rank. `repeats`: microbatches that make up the graph's batch, see `Prices`.

    A plan says how tensor ranks cut parameters; over data a run places operators by itself (`weft.run.build.shard_of`), at default prices.
    """
    speed = cluster.speed(layout.num_ranks, layout.threads)
    found = {}
    for axis, size in layout.axes:
        if axis in ("pipeline", "data") or size == 1:
            continue
        group = group_of(layout, axis)
        little, much = (collective_s(cluster, "all_reduce", s, group) for s in (1.0, 2.0**24))
        rate = 2 * (size - 1) / size * 2.0**24 / max(much - little, 1e-9)
        flops = dict(speed.flops).get(layout.precision, min(rate for _, rate in speed.flops))
        found[axis] = Prices(flops, speed.memory_bandwidth_bytes_per_s, rate, little, repeats)
    return found
