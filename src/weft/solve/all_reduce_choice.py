"""Choose the all-reduce algorithm that `all_reduce=auto` stands for, by message size.

On one host the transport's own all-reduce is chosen: gradients lie in shared memory that all ranks map, so that it copies nothing, which no
program of messages can beat; between several hosts `hierarchical` is that inside each host. On GPUs it is NCCL's. Between CPU hosts whose
messages were measured it is the predicted best; between others, two levels.

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
    """Choose the algorithms that reduce the gradients of a layout.

    >>> str(sums_of(Cluster.parse("4xcpu-2"), Layout(data=8))), str(sums_of(Cluster.parse("1xcpu-2"), Layout(data=2)))
    ('hierarchical', 'native')
    """
    if layout.all_reduce != AUTO:
        return Choices()
    options = offered(cluster, layout)
    return Choices(above=options[0]) if len(options) == 1 else choose(cluster, Group(layout.data, layout.replica_ranks, layout.num_ranks))


def offered(cluster: Cluster, layout: Layout) -> tuple[str, ...]:
    """Names of the algorithms that `all_reduce=auto` compares: programs of messages only where those were measured, between CPU hosts."""
    if layout.data == 1 or not cluster.kind.times_programs:
        return (NATIVE,)
    group = Group(layout.data, layout.replica_ranks, layout.num_ranks)
    ranks_on_path = path(cluster, group)
    if ranks_on_path.nodes == 1:
        return (NATIVE,) if cluster.ranks_per_node(layout.num_ranks) >= layout.num_ranks else ("hierarchical",)
    if any(table.collective.startswith("send") for table in cluster.tables):
        return tuple(algorithms(cluster, group))
    return ("hierarchical",) if ranks_on_path.inside > 1 else (NATIVE,)


def why(cluster: Cluster, layout: Layout, sums: Choices, bucket_bytes: int = 0) -> str:
    """Explain the all-reduce choice: seconds of a bucket by the plan's algorithm and by the best other one; empty without replicas.

    >>> layout = Layout(data=8)
    >>> why(Cluster.parse("1xdgx-a100-80"), layout, sums_of(Cluster.parse("1xdgx-a100-80"), layout))
    "native (the library's own): a bucket of 25.0 MiB is summed in 285 us; on GPUs nothing else is compared, for lack of measurements"
    """
    if layout.data == 1 or layout.inner:
        return ""
    group = Group(layout.data, layout.replica_ranks, layout.num_ranks)
    size = bucket_bytes or BUCKET_BYTES
    times = {name: call(size) for name, call in algorithms(cluster, group).items()}
    chosen = sums.of(size) if layout.all_reduce == AUTO else layout.all_reduce
    if chosen not in times:
        return ""
    library_note = " (the library's own)" if chosen == NATIVE else ""
    text = f"{chosen}{library_note}: a bucket of {format_bytes(size)} is summed in {format_seconds(times[chosen])}"
    candidates = [name for name in offered(cluster, layout) if name in times and name != chosen]
    best_other = min(candidates, key=times.__getitem__, default="")
    if best_other:
        text += f", by {best_other} it would take {format_seconds(times[best_other])}"
        if times[best_other] < times[chosen] and layout.all_reduce == AUTO:
            text += f"; a program is taken where it saves {MARGIN:.0%}, which is as good as predictions are"
    elif not cluster.kind.times_programs:
        text += "; on GPUs nothing else is compared, for lack of measurements"
    elif chosen == "hierarchical":
        text += "; between hosts that were not measured nothing else is compared"
    return text
