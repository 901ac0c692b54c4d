"""Checks that refuse a layout, before or after it is priced, for a cluster, a batch or a model, with the numbers and the remedy."""

from __future__ import annotations

from shardwise.cluster.cluster import Cluster
from shardwise.cost.operators.sharded_inventory import block_of
from shardwise.cost.step import Pricer, combine_stage_memory
from shardwise.cost.step_time.heterogeneous import check_ranks_fit
from shardwise.cost.step_time.timing import PricedLayout
from shardwise.errors import Infeasible, LayoutError
from shardwise.model.dims.labels import expert_weights
from shardwise.model.graph import Graph
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import layout_microbatch_sizes
from shardwise.schedules import schedule_of


def check_layout(layout: Layout, cluster: Cluster, batch_size: int) -> None:
    """Raise `Infeasible` where the layout cannot be on this cluster or with this batch, with the numbers and the remedy."""
    if layout.num_ranks > cluster.num_devices and not cluster.kind.shares_hosts:
        raise Infeasible(f"{layout} needs {layout.num_ranks} devices, {cluster.name} has {cluster.num_devices}; make an axis smaller")
    sizes = layout_microbatch_sizes(batch_size, layout)
    if layout.sample_parallel == "on" and any(size % (layout.data * layout.tensor) for size in sizes):
        raise Infeasible(
            f"{layout}: a replica's microbatches of {sizes[-1] // layout.data} samples do not divide among tensor={layout.tensor} ranks, "
            "over which sample_parallel=on may cut them; use fewer microbatches, fewer tensor ranks, or leave sample_parallel out"
        )
    if layout.threads and not cluster.kind.shares_hosts:
        raise LayoutError(
            f"threads={layout.threads}: threads are of processors' cores, and {cluster.name} has {cluster.device.name}; leave it out"
        )
    cluster.device.peak(layout.precision)


def check_layers(pricer: Pricer, priced: PricedLayout) -> None:
    """Refuse a layout by hand that asks for layers or experts which the model does not have.

    Raises:
        LayoutError: with the layers or experts that it has.
    """
    layout, experts = priced.layout, num_experts(pricer.graph)
    if layout.expert > experts:
        available = f"its widest layer has {experts}; use that many or fewer" if experts > 1 else "it has none; leave it out"
        raise LayoutError(f"expert={layout.expert} spreads the experts of a layer, and of this model {available}")
    blocks = [dict.fromkeys(block_of(op.site) for op in stage.operators) for stage in pricer.stages_at(priced.sites)]
    layout.residency.check([list(filter(None, names)) or [""] for names in blocks])


def num_experts(graph: Graph) -> int:
    """Number of experts of the widest layer, 1 where there are none."""
    sizes = {v.value: v.tensor.shape[0] for v in graph.parameters if v.tensor.shape}
    return max((sizes[value] for value in expert_weights(graph)), default=1)


def num_blocks(graph: Graph) -> int:
    """Number of layers that recomputation treats as units: a model's numbered blocks, 1 where it has none."""
    return max(1, len({block_of(op.site) for op in graph.operators} - {""}))


def check_priced(pricer: Pricer, priced: PricedLayout) -> None:
    """Raise `Infeasible` with the numbers where a rank does not fit on its devices."""
    layout = priced.layout
    if not pricer.cluster.parts:
        pricer.check_memory(layout, priced.prediction)
        return
    schedule = schedule_of(layout)
    rank_memory = [
        combine_stage_memory([priced.costs[s].memory for s in stages], schedule, rank) for rank, stages in enumerate(schedule.stages_of)
    ]
    check_ranks_fit(pricer, layout, [memory.total for memory in rank_memory])
