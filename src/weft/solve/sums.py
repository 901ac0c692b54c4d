"""What `all_reduce=auto` is in a plan. In: a cluster and a layout. Out: choices by bytes.

On one host the transport's own sum is taken: gradients lie in memory that all ranks map, so that it copies nothing, which no program of
messages can beat; in a run over several hosts `hierarchical` is that inside each. On GPUs NCCL's is taken. Between hosts of processors that
were measured, the predicted best; of others, two levels.
"""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.cost.collectives import choose
from weft.cost.network import Group, path
from weft.plan.choice import AUTO, Choices
from weft.plan.layout import Layout


def sums_of(cluster: Cluster, layout: Layout) -> Choices:
    """The algorithms that sum gradients of a layout.

    >>> str(sums_of(Cluster.parse("4xcpu-2"), Layout(data=8))), str(sums_of(Cluster.parse("1xcpu-2"), Layout(data=2)))
    ('hierarchical', 'native')
    """
    if layout.all_reduce != AUTO or layout.data == 1 or not cluster.is_cpu:
        return Choices()
    group = Group(layout.data, layout.tensor, layout.num_ranks)
    where = path(cluster, group)
    if where.nodes == 1:
        inside = cluster.ranks_per_node(layout.num_ranks) >= layout.num_ranks
        return Choices() if inside else Choices(above="hierarchical")
    if any(table.collective.startswith("send") for table in cluster.tables):
        return choose(cluster, group)
    return Choices(above="hierarchical") if where.inside > 1 else Choices()
