"""Candidate numbers of ranks for branch parallelism (`branch=`), where ranks of a replica run different parallel branches of the model.

Searched where branches are most of the model (Inception, towers) and balanced well enough: a transformer's three projections of one input
are branches as well, and tensor ranks do more for them.

"""

from __future__ import annotations

from shardwise.cluster.cluster import Cluster
from shardwise.model.graph import Graph
from shardwise.model.stages.branches import BranchRegion, balance_branches, find_regions
from shardwise.model.work import operator_flops

MIN_BRANCH_FRACTION = 0.5  # of the model's FLOPs are in branches, at least
MIN_BALANCE = 0.6  # of what an even division takes off the busiest rank, at least


def branch_rank_counts(graph: Graph, cluster: Cluster) -> tuple[int, ...]:
    """Return powers of two, and as many ranks as a region has branches; none where branches are little of the model.

    >>> from shardwise.cluster.cluster import Cluster
    >>> branch_rank_counts(Graph((), (), (), (), (), {}, "loss", 1), Cluster.parse("1xdgx-h100"))
    ()
    """
    flops = [operator_flops(op, graph.tensors) for op in graph.operators]
    outer: list[BranchRegion] = []
    covered: set[int] = set()
    for region in find_regions(graph):
        if covered.isdisjoint(region.operators):
            outer.append(region)
            covered |= region.operators
    if not outer or sum(flops[i] for i in covered) < MIN_BRANCH_FRACTION * sum(flops):
        return ()
    work = [[sum(flops[i] for i in branch) for branch in region.branches] for region in outer]
    max_branches = max(map(len, work))
    sizes = {1 << k for k in range(1, max_branches.bit_length())} | {max_branches}
    return tuple(
        n
        for n in sorted(sizes)
        if n <= cluster.num_devices and _flops_taken_off(work, n) >= MIN_BALANCE * MIN_BRANCH_FRACTION * (1 - 1 / n) * sum(flops)
    )


def _flops_taken_off(work: list[list[float]], n: int) -> float:
    """FLOPs that n ranks take off the busiest one."""
    taken_off = 0.0
    for branches in work:
        loads = [0.0] * n
        for flops, rank in zip(branches, balance_branches(branches, n), strict=True):
            loads[rank] += flops
        taken_off += sum(loads) - max(loads)
    return taken_off
