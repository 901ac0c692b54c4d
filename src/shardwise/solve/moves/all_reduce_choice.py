"""Choose the all-reduce algorithm that `all_reduce=auto` stands for, by message size.

On one host the transport's own all-reduce is chosen: gradients lie in shared memory that all ranks map, so that it copies nothing, which no
program of messages can beat; between several hosts `hierarchical` is that inside each host. On GPUs it is NCCL's. Between CPU hosts whose
messages were measured it is the predicted best; between others, two levels.

"""

from __future__ import annotations

from shardwise.cluster.cluster import Cluster
from shardwise.cost.network.collectives import MARGIN, algorithm_times, choose_algorithms
from shardwise.cost.network.network import RankGroup, group_path
from shardwise.plan.ir.choice import AUTO, NATIVE, AllReduceChoices
from shardwise.plan.layout import Layout
from shardwise.plan.plan import BUCKET_BYTES
from shardwise.units import format_bytes, format_seconds


def choose_gradient_all_reduce(cluster: Cluster, layout: Layout) -> AllReduceChoices:
    """Choose the algorithms that reduce the gradients of a layout.

    >>> str(choose_gradient_all_reduce(Cluster.parse("4xcpu-2"), Layout(data=8))), str(choose_gradient_all_reduce(Cluster.parse("1xcpu-2"), Layout(data=2)))
    ('hierarchical', 'native')
    """  # noqa: E501
    if layout.all_reduce != AUTO:
        return AllReduceChoices()
    options = candidate_algorithms(cluster, layout)
    return (
        AllReduceChoices(default=options[0])
        if len(options) == 1
        else choose_algorithms(cluster, RankGroup(layout.data, layout.replica_ranks, layout.num_ranks))
    )


def candidate_algorithms(cluster: Cluster, layout: Layout) -> tuple[str, ...]:
    """Names of the algorithms that `all_reduce=auto` compares: programs of messages only where those were measured, between CPU hosts."""
    if layout.data == 1 or not cluster.kind.prices_programs:
        return (NATIVE,)
    group = RankGroup(layout.data, layout.replica_ranks, layout.num_ranks)
    ranks_on_path = group_path(cluster, group)
    if ranks_on_path.nodes == 1:
        return (NATIVE,) if cluster.ranks_per_node(layout.num_ranks) >= layout.num_ranks else ("hierarchical",)
    if any(table.collective.startswith("send") for table in cluster.tables):
        return tuple(algorithm_times(cluster, group))
    return ("hierarchical",) if ranks_on_path.inside > 1 else (NATIVE,)


def explain_all_reduce(cluster: Cluster, layout: Layout, choices: AllReduceChoices, bucket_bytes: int = 0) -> str:
    """Explain the all-reduce choice: seconds of a bucket by the plan's algorithm and by the best other one; empty without replicas.

    >>> layout = Layout(data=8)
    >>> explain_all_reduce(Cluster.parse("1xdgx-a100-80"), layout, choose_gradient_all_reduce(Cluster.parse("1xdgx-a100-80"), layout))
    "native (the library's own): a bucket of 25.0 MiB is summed in 285 us; on GPUs nothing else is compared, for lack of measurements"
    """
    if layout.data == 1 or layout.inner:
        return ""
    group = RankGroup(layout.data, layout.replica_ranks, layout.num_ranks)
    size = bucket_bytes or BUCKET_BYTES
    times = {name: call(size) for name, call in algorithm_times(cluster, group).items()}
    chosen = choices.algorithm_for(size) if layout.all_reduce == AUTO else layout.all_reduce
    if layout.collective:
        return f"{chosen}: your own, proven; it is priced as the library's own, and `shardwise collectives compare` times the others"
    if chosen not in times:
        return ""
    library_note = " (the library's own)" if chosen == NATIVE else ""
    text = f"{chosen}{library_note}: a bucket of {format_bytes(size)} is summed in {format_seconds(times[chosen])}"
    candidates = [name for name in candidate_algorithms(cluster, layout) if name in times and name != chosen]
    best_other = min(candidates, key=times.__getitem__, default="")
    if best_other:
        text += f", by {best_other} it would take {format_seconds(times[best_other])}"
        if times[best_other] < times[chosen] and layout.all_reduce == AUTO:
            text += f"; a program is taken where it saves {MARGIN:.0%}, which is as good as predictions are"
    elif not cluster.kind.prices_programs:
        text += "; on GPUs nothing else is compared, for lack of measurements"
    elif chosen == "hierarchical":
        text += "; between hosts that were not measured nothing else is compared"
    return text
