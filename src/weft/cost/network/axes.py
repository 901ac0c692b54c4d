"""Where the ranks of a layout's mesh axes lie on the links. In: a layout, axes by name. Out: the `Group` that talks along them.

The last axis varies fastest: its ranks are neighbours, those of the one before lie as far apart as it has ranks, and so on. Not modelled:
groups of unequal strides, which arise where axes between those named are left out; they count as evenly spread over what they span.
"""

from __future__ import annotations

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
