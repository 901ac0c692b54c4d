"""Candidate numbers of ranks for branch parallelism (`branch=`), where ranks of a replica run different parallel branches of the model.

Searched where branches are most of the model (Inception, towers) and balanced well enough: a transformer's three projections of one input
are branches as well, and tensor ranks do more for them.

"""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.model.stages.branches import Region, balanced
from weft.model.work import operator_flops

PART = 0.5  # of the model's FLOPs are in branches, at least
BALANCED = 0.6  # of what an even division takes off the busiest rank, at least


def counts(graph: Graph, cluster: Cluster) -> tuple[int, ...]:
    """Return powers of two, and as many ranks as a region has branches; none where branches are little of the model.

    >>> from weft.cluster.cluster import Cluster
    >>> counts(Graph((), (), (), (), (), {}, "loss", 1), Cluster.parse("1xdgx-h100"))
    ()
    """
    flops = [operator_flops(op, graph.tensors) for op in graph.operators]
    outer: list[Region] = []
    covered: set[int] = set()
    for region in graph.regions:
        if covered.isdisjoint(region.operators):
            outer.append(region)
            covered |= region.operators
    if not outer or sum(flops[i] for i in covered) < PART * sum(flops):
        return ()
    work = [[sum(flops[i] for i in branch) for branch in region.branches] for region in outer]
    max_branches = max(map(len, work))
    sizes = {1 << k for k in range(1, max_branches.bit_length())} | {max_branches}
    return tuple(n for n in sorted(sizes) if n <= cluster.num_devices and _off(work, n) >= BALANCED * PART * (1 - 1 / n) * sum(flops))


def _off(work: list[list[float]], n: int) -> float:
    """FLOPs that n ranks take off the busiest one."""
    taken_off = 0.0
    for branches in work:
        loads = [0.0] * n
        for flops, rank in zip(branches, balanced(branches, n), strict=True):
            loads[rank] += flops
        taken_off += sum(loads) - max(loads)
    return taken_off
