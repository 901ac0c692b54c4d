"""Leading pipelines with each replica's stages side by side. In: what was priced with replicas as neighbours. Out: layouts worth a price.

What stages hand on then passes a node's ports less often, and sums of gradients pass them once for each stage of a node in place of once:
it pays where activations outweigh weights (large images, small microbatches' borders), as for GEMS (Jain et al., SC'20). The compute is
the same, so only the leading layouts are turned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from weft.cluster.cluster import Cluster
from weft.plan.axis import BRANCH, PIPELINE
from weft.plan.layout import Layout
from weft.solve.timing import Priced

MOST = 4  # layouts that are turned


def turned(cluster: Cluster, priced: Iterable[Priced], hopeless: Callable[[Layout, float], bool]) -> Iterator[Layout]:
    """The leading layouts for which it may pay, each mesh once.

    `hopeless`: whether a layout of at least so many seconds cannot be the best.
    """
    seen: set[tuple[tuple[str, int], ...]] = set()
    for one in sorted(priced, key=lambda p: p.prediction.step_time_s):
        layout = one.layout
        may = layout.neighbours == BRANCH and layout.branch == 1 and min(layout.pipeline, layout.data) > 1 and not layout.inner
        if not may or cluster.parts or layout.replica_ranks >= cluster.node_size or layout.num_ranks <= cluster.node_size:
            continue
        handed_s = dict(one.prediction.parts).get("pipeline", 0.0)
        if layout.axes in seen or len(seen) == MOST or hopeless(layout, one.prediction.step_time_s - handed_s):
            continue
        seen.add(layout.axes)
        yield replace(layout, neighbours=PIPELINE)
