"""What `all_reduce=auto` is in a plan. In: a cluster and a layout. Out: choices by bytes, of those that are weighed there.

On one host the transport's own sum is taken: gradients lie in memory that all ranks map, so that it copies nothing, which no program of
messages can beat; in a run over several hosts `hierarchical` is that inside each. On GPUs NCCL's is taken. Between hosts of processors that
were measured, the predicted best; of others, two levels.
"""

from __future__ import annotations

from weft.cluster.cluster import Cluster
from weft.cost.network.collectives import MARGIN, algorithms, choose
from weft.cost.network.network import Group, path
from weft.plan.choice import AUTO, NATIVE, Choices
from weft.plan.layout import Layout
from weft.plan.plan import BUCKET_BYTES
from weft.units import format_bytes, format_seconds


def sums_of(cluster: Cluster, layout: Layout) -> Choices:
    """The algorithms that sum gradients of a layout.

    >>> str(sums_of(Cluster.parse("4xcpu-2"), Layout(data=8))), str(sums_of(Cluster.parse("1xcpu-2"), Layout(data=2)))
    ('hierarchical', 'native')
    """
    if layout.all_reduce != AUTO:
        return Choices()
    weighed = offered(cluster, layout)
    return Choices(above=weighed[0]) if len(weighed) == 1 else choose(cluster, Group(layout.data, layout.replica_ranks, layout.num_ranks))


def offered(cluster: Cluster, layout: Layout) -> tuple[str, ...]:
    """What `all_reduce=auto` weighs: programs only where their messages were measured, between processors."""
    if layout.data == 1 or not cluster.kind.times_programs:
        return (NATIVE,)
    group = Group(layout.data, layout.replica_ranks, layout.num_ranks)
    where = path(cluster, group)
    if where.nodes == 1:
        return (NATIVE,) if cluster.ranks_per_node(layout.num_ranks) >= layout.num_ranks else ("hierarchical",)
    if any(table.collective.startswith("send") for table in cluster.tables):
        return tuple(algorithms(cluster, group))
    return ("hierarchical",) if where.inside > 1 else (NATIVE,)


def why(cluster: Cluster, layout: Layout, sums: Choices, bucket_bytes: int = 0) -> str:
    """What a bucket of gradients takes by the algorithm that a plan has, and by the best other one that is weighed there; empty where
    replicas sum nothing.

    >>> layout = Layout(data=8)
    >>> why(Cluster.parse("1xdgx-a100-80"), layout, sums_of(Cluster.parse("1xdgx-a100-80"), layout))
    "native (the library's own): a bucket of 25.0 MiB is summed in 285 us; on GPUs nothing else is weighed, for lack of measurements"
    """
    if layout.data == 1 or layout.inner:
        return ""
    group = Group(layout.data, layout.replica_ranks, layout.num_ranks)
    size = bucket_bytes or BUCKET_BYTES
    times = {name: call(size) for name, call in algorithms(cluster, group).items()}
    mine = sums.of(size) if layout.all_reduce == AUTO else layout.all_reduce
    if mine not in times:
        return ""
    whose = " (the library's own)" if mine == NATIVE else ""
    text = f"{mine}{whose}: a bucket of {format_bytes(size)} is summed in {format_seconds(times[mine])}"
    weighed = [name for name in offered(cluster, layout) if name in times and name != mine]
    other = min(weighed, key=times.__getitem__, default="")
    if other:
        text += f", by {other} it would take {format_seconds(times[other])}"
        if times[other] < times[mine] and layout.all_reduce == AUTO:
            text += f"; a program is taken where it saves {MARGIN:.0%}, which is as good as predictions are"
    elif not cluster.kind.times_programs:
        text += "; on GPUs nothing else is weighed, for lack of measurements"
    elif mine == "hierarchical":
        text += "; between hosts that were not measured nothing else is weighed"
    return text
