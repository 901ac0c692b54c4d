"""Where operators are placed that are priced. In: a graph, a layout, samples of a rank. Out: a sharding, and what it was weighed by.

It follows from a rank's own samples: replicas beside it change nothing. Not modelled: placements between those that are weighed
(`weft.model.sharding.sharding.weighed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import gcd, isqrt

from weft.cluster.cluster import Cluster
from weft.cost.network.axes import group_of
from weft.cost.network.network import collective_s
from weft.model.graph import Graph
from weft.model.sharding.fold import propagate
from weft.model.sharding.sharding import Prices, Sharding, Shards
from weft.plan.axis import DATA, axis_of
from weft.plan.grid import TENSOR
from weft.plan.layout import Layout


def placed_sizes(layout: Layout, batch_size: int) -> dict[str, int]:
    """The axes over which operators of a graph of so many samples are placed, with their sizes. The fewest replicas that divide its samples
    stand for all: the same labels are cut whatever their number, and what a rank has depends on its own samples alone.

    >>> [placed_sizes(Layout(data=n), 15 * 8)["data"] for n in (1, 8, 15)], placed_sizes(Layout(data=3), 8)["data"]
    ([1, 2, 3], 2)
    """
    data = layout.data
    each = batch_size // layout.branch or 1
    replicas = _least_factor(gcd(data, each)) or _least_factor(each) or 2
    return {DATA: replicas if data > 1 else 1, **dict(layout.inner_axes)}


@cache
def _least_factor(number: int) -> int:
    """The smallest of its factors above 1; 0 for 1."""
    return 0 if number < 2 else next((n for n in range(2, isqrt(number) + 1) if number % n == 0), number)


def prices_of(cluster: Cluster, layout: Layout, samples: int) -> dict[str, Prices]:
    """By axis over which operators are placed. `samples`: of a microbatch, all replicas together over which they are placed.

    A plan says how tensor ranks cut parameters; over data and context a run places operators by itself (`weft.run.build.shard_of`), at
    default prices.
    """
    speed = cluster.speed(layout.num_ranks, layout.threads)
    prices = {DATA: Prices(samples=samples)}
    for axis, size in layout.axes:
        if size == 1 or not axis_of(axis).cuts or axis_of(axis).cuts_samples:
            continue
        if axis_of(axis).cuts_sequences:
            prices[axis] = prices[DATA]
            continue
        group = group_of(layout, axis)
        little, much = (collective_s(cluster, "all_reduce", s, group) for s in (1.0, 2.0**24))
        rate = 2 * (size - 1) / size * 2.0**24 / max(much - little, 1e-9)
        flops = dict(speed.flops).get(layout.precision, min(rate for _, rate in speed.flops))
        prices[axis] = Prices(flops, speed.memory_bandwidth_bytes_per_s, rate, little, samples)
    return prices


def placed(graph: Graph, cluster: Cluster, layout: Layout, each: int, shards: Mapping[str, Shards] | None = None) -> Sharding:
    """The sharding over data and the tensor axes. `each`: samples of a rank's microbatch, as weighed; `shards`: cuts that are given."""
    sizes, sequence, cuts_samples = placed_sizes(layout, graph.batch_size), layout.sequence_parallel == "on", layout.sample_parallel == "on"
    running = Prices(samples=each * sizes[DATA])  # as a run has them, which places operators at default prices
    if not cuts_samples and not layout.grid:
        # A run is given the weights' cuts alone. Those that other prices find are run in another way than they were found for.
        sharding = propagate(graph, sizes, shards, prices=running, sequence=sequence, attention=layout.attention)
        said = layout.tensor == 1 or TENSOR in (shards or {})
        return sharding if said else propagate(graph, sizes, sharding.shards, prices=running, sequence=sequence, attention=layout.attention)
    prices = prices_of(cluster, layout, each * sizes[DATA])
    sharding = propagate(graph, sizes, shards, prices=prices, sequence=sequence, samples=cuts_samples, attention=layout.attention)
    matrices = sum(len(v.tensor.shape) > 1 for v in graph.parameters)
    few = any(2 * len(sharding.shards.get(axis, ())) < matrices for axis, n in layout.tensor_axes if n > 1)
    if few and not cuts_samples:
        # Too small a model for cuts to pay; but who asks for tensor ranks wants them to share the work.
        sharding = propagate(graph, sizes, shards, prices=running, sequence=sequence, attention=layout.attention)
    # What runs is propagated from the weights' cuts, which are all that a plan says.
    return propagate(graph, sizes, sharding.shards, prices=running, sequence=sequence, samples=cuts_samples, attention=layout.attention)
