"""Links of a cluster for message simulation. In: a cluster. Out: the `Wire` between two of its ranks.

Ranks are numbered in the order of the cluster's hierarchy, neighbours in one node. A message takes the link of the innermost level that
has both of its ends; ranks of a unit share its ports evenly, each message uses one. Not modelled: the sender's cost of posting a message,
so that many small ones at once look free, and protocols of a library, which `shardwise.cost.network.network` prices for its own algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardwise.cluster.cluster import Cluster
from shardwise.errors import UsageError
from shardwise.simulate.messages import Wire


def cluster_wires(cluster: Cluster) -> Callable[[int, int], Wire]:
    """Return a function from two ranks to the wire between them.

    >>> from shardwise.cluster.cluster import Cluster
    >>> between = cluster_wires(Cluster.parse("2xdgx-a100-80"))
    >>> between(0, 1).byte_s < between(0, 8).byte_s
    True

    Raises:
        UsageError: the returned function raises it for ranks outside of the cluster.
    """
    cache: dict[tuple[int, int], Wire] = {}

    def wire(source: int, target: int) -> Wire:
        cached = cache.get((source, target))
        if cached is None:
            if not (0 <= source < cluster.num_devices and 0 <= target < cluster.num_devices):
                raise UsageError(f"ranks {source} and {target} of {cluster.name}, which has {cluster.num_devices} devices")
            cached = cache[source, target] = _wire_between(cluster, source, target)
        return cached

    return wire


def _wire_between(cluster: Cluster, source: int, target: int) -> Wire:
    unit = 1
    for depth, level in enumerate(cluster.levels):
        below, unit = unit, unit * level.size
        if source // unit == target // unit or level is cluster.levels[-1]:
            link = level.link
            byte_s = (
                link.ports / (link.bandwidth_bytes_per_s * link.efficiency)
                if below > 1
                else 1 / (link.bandwidth_bytes_per_s * link.efficiency)
            )
            shared: tuple[Hashable, ...] = ()
            if below > 1:
                ports = tuple((rank // below, rank % below * link.ports // below) for rank in (source, target))
                shared = ((depth, "out", *ports[0]), (depth, "in", *ports[1]))
            return Wire(link.latency_s, byte_s, shared, cluster.device.launch_s)
    raise AssertionError(cluster.name)
