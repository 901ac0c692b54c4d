"""Variants of leading pipelines with each replica's stages on adjacent ranks (`neighbours=pipeline`), instead of its replicas.

Sends between stages then cross a node's network ports less often, and gradient reductions cross them once for each stage of a node instead
of once: it pays where activations outweigh weights (large images, boundaries of small microbatches), as for GEMS (Jain et al., SC'20). The
compute is the same, so only the leading layouts are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step_time.timing import PricedLayout
from shardwise.plan.ir.axis import BRANCH, PIPELINE
from shardwise.plan.layout import Layout

MAX_LAYOUTS = 4  # layouts


def with_adjacent_stages(cluster: Cluster, priced: Iterable[PricedLayout], cannot_win: Callable[[Layout, float], bool]) -> Iterator[Layout]:
    """Yield the leading layouts for which it may pay, each mesh once.

    `cannot_win`: whether a layout of at least so many seconds cannot be the best.
    """
    visited: set[tuple[tuple[str, int], ...]] = set()
    for candidate in sorted(priced, key=lambda p: p.prediction.step_time_s):
        layout = candidate.layout
        is_eligible = layout.neighbours == BRANCH and layout.branch == 1 and min(layout.pipeline, layout.data) > 1 and not layout.inner
        if not is_eligible or cluster.parts or layout.replica_ranks >= cluster.node_size or layout.num_ranks <= cluster.node_size:
            continue
        sends_s = dict(candidate.prediction.parts).get("pipeline", 0.0)
        if layout.axes in visited or len(visited) == MAX_LAYOUTS or cannot_win(layout, candidate.prediction.step_time_s - sends_s):
            continue
        visited.add(layout.axes)
        yield replace(layout, neighbours=PIPELINE)
