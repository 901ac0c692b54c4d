"""Choice of the sharding of priced operators. In: a graph, a layout, samples per rank. Out: a sharding, and the prices that decided it.

It depends on a rank's own samples, not on the number of replicas. Not modelled: shardings between the weighed numbers of samples
(`shardwise.model.sharding.sharding.priced_num_samples`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd, isqrt

from shardwise.cluster.cluster import Cluster
from shardwise.cost.network.axes import group_of
from shardwise.cost.network.network import collective_s
from shardwise.model.graph import Graph
from shardwise.model.sharding.fold import propagate_with_folding
from shardwise.model.sharding.sharding import Prices, Sharding, Shards, refuse_idle_axes
from shardwise.plan.ir.axis import DATA, axis_of
from shardwise.plan.ir.grid import TENSOR
from shardwise.plan.layout import Layout


def placement_axis_sizes(layout: Layout, batch_size: int) -> dict[str, int]:
    """Return the axes over which operators are sharded, with their sizes. The smallest number of replicas that divides the samples stands
    for all: the same labels are sharded whatever their number, and a rank's work depends on its own samples alone.

    >>> [placement_axis_sizes(Layout(data=n), 15 * 8)["data"] for n in (1, 8, 15)], placement_axis_sizes(Layout(data=3), 8)["data"]
    ([1, 2, 3], 2)
    """
    data = layout.data
    each = batch_size // layout.branch or 1
    replicas = _smallest_factor(gcd(data, each)) or _smallest_factor(each) or 2
    return {DATA: replicas if data > 1 else 1, **dict(layout.inner_axes)}


@cache
def _smallest_factor(number: int) -> int:
    """Return the smallest factor above 1; 0 for 1."""
    return 0 if number < 2 else next((n for n in range(2, isqrt(number) + 1) if number % n == 0), number)


def prices_of(cluster: Cluster, layout: Layout, samples: int) -> dict[str, Prices]:
    """Return the prices by axis of operator placement. `samples`: of a microbatch, over all replicas of the placement.

    A plan states how tensor ranks shard parameters; over data and context a run places operators itself
    (`shardwise.run.rank_model.model_source.shard_graph`), at
    default prices.
    """
    speed = cluster.speed(layout.num_ranks, layout.threads)
    prices = {DATA: Prices(samples=samples)}
    for axis, size in layout.axes:
        if size == 1 or not axis_of(axis).shards or axis_of(axis).shards_samples:
            continue
        if axis_of(axis).shards_sequences:
            prices[axis] = prices[DATA]
            continue
        group = group_of(layout, axis)
        small_s, large_s = (collective_s(cluster, "all_reduce", s, group) for s in (1.0, 2.0**24))
        rate = 2 * (size - 1) / size * 2.0**24 / max(large_s - small_s, 1e-9)
        flops = dict(speed.flops).get(layout.precision, min(rate for _, rate in speed.flops))
        prices[axis] = Prices(flops, speed.memory_bandwidth_bytes_per_s, rate, small_s, samples)
    return prices


def choose_sharding(
    graph: Graph, cluster: Cluster, layout: Layout, samples_per_rank: int, shards: Mapping[str, Shards] | None = None
) -> Sharding:
    """Choose the sharding over data and the tensor axes. `samples_per_rank`: weighed samples of a microbatch; `shards`: fixed shards.

    Raises:
        LayoutError: an axis that the model does not have, or that divides nothing of it.
    """
    sharding = _choose_sharding(graph, cluster, layout, samples_per_rank, shards)
    refuse_idle_axes(sharding, graph.parameter_shapes)
    return sharding


def _choose_sharding(
    graph: Graph, cluster: Cluster, layout: Layout, samples_per_rank: int, shards: Mapping[str, Shards] | None = None
) -> Sharding:
    sizes, sequence, cuts_samples = (
        placement_axis_sizes(layout, graph.batch_size),
        layout.sequence_parallel == "on",
        layout.sample_parallel == "on",
    )
    running = Prices(samples=samples_per_rank * sizes[DATA])  # as in a run, which places operators at default prices
    if not cuts_samples and not layout.grid:
        # A run is given only the shards of weights and places operators at its own prices, so they have to be found at the same prices.
        sharding = propagate_with_folding(graph, sizes, shards, prices=running, sequence=sequence, attention=layout.attention)
        if layout.tensor == 1 or TENSOR in (shards or {}):
            return sharding
        return propagate_with_folding(graph, sizes, sharding.shards, prices=running, sequence=sequence, attention=layout.attention)
    prices = prices_of(cluster, layout, samples_per_rank * sizes[DATA])
    sharding = propagate_with_folding(
        graph, sizes, shards, prices=prices, sequence=sequence, samples=cuts_samples, attention=layout.attention
    )
    matrices = sum(len(v.tensor.shape) > 1 for v in graph.parameters)
    shards_few_weights = any(2 * len(sharding.shards.get(axis, ())) < matrices for axis, n in layout.tensor_axes if n > 1)
    if shards_few_weights and not cuts_samples:
        # The model is too small for sharding to pay, but a user who asks for tensor ranks wants them to share the work.
        sharding = propagate_with_folding(graph, sizes, shards, prices=running, sequence=sequence, attention=layout.attention)
    # A run propagates from the shards of weights, which are all that a plan states.
    return propagate_with_folding(
        graph, sizes, sharding.shards, prices=running, sequence=sequence, samples=cuts_samples, attention=layout.attention
    )
