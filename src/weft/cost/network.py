"""Seconds of a collective. In: a cluster, how many ranks take part and how far apart they are, bytes. Out: seconds.

Measured tables win where the cluster has them. Otherwise latency and bandwidth (Hockney's alpha-beta): a ring inside a node
and through the nodes' ports, whichever is slower (Patarasuk and Yuan 2009), with logarithmic latency between nodes, as trees have.
Groups that communicate at the same time share their node's port. Not modelled: protocols by size, in-network reduction, congestion
behind the port, and collectives that slow down compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2

from weft.cluster.cluster import Cluster, Link
from weft.errors import UsageError

# Bytes through one rank's port, as a part of the whole tensor, for n ranks; and the latencies in a row on a ring.
FACTORS: dict[str, tuple[Callable[[int], float], Callable[[int], int]]] = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "all_gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_to_all": (lambda n: (n - 1) / n**2, lambda n: n - 1),
    "broadcast": (lambda n: 1.0, lambda n: n - 1),
}
FREE = ("", "slice", "pad")  # redistributions that move nothing


@dataclass(frozen=True, slots=True)
class Group:
    """`size` ranks, neighbours `stride` apart, of a job of `num_ranks`, all of whose like groups communicate at once."""

    size: int
    stride: int = 1
    num_ranks: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1 or (self.num_ranks and self.num_ranks < self.size):
            raise UsageError(f"a group of {self.size} ranks, {self.stride} apart, of {self.num_ranks} does not exist")

    @property
    def total(self) -> int:
        return max(self.num_ranks, self.size * self.stride)


def members_per_unit(group: Group, unit: int) -> int:
    """Ranks of the group in one unit of `unit` consecutive devices."""
    return max(1, min(group.size, unit // group.stride))


def ring_s(name: str, size_bytes: float, num_ranks: int, link: Link) -> float:
    """A ring of `num_ranks` over one link each: factor·S/bandwidth + steps·latency; all-reduce: 2(n-1)/n and 2(n-1)."""
    if num_ranks < 2:
        return 0.0
    factor, steps = FACTORS[name]
    return float(factor(num_ranks) * size_bytes / (link.bandwidth_bytes_per_s * link.efficiency) + steps(num_ranks) * link.latency_s)


def collective_s(cluster: Cluster, name: str, size_bytes: float, group: Group) -> float:
    """Seconds of collective `name` on a tensor of `size_bytes` in all (its whole, however it is cut) in every group at once.

    >>> from weft.cluster.cluster import Cluster
    >>> round(1e3 * collective_s(Cluster.parse("dgx-a100-40"), "all_reduce", 2**30, Group(8)), 1)
    8.2

    Raises:
        UsageError: a collective that is not known, by name.
    """
    n = group.size
    if name in FREE or n < 2 or size_bytes <= 0:
        return 0.0
    if name not in FACTORS:
        raise UsageError(f"unknown collective {name}; known: {', '.join(FACTORS)}")
    measured = _measured_s(cluster, name, size_bytes, group)
    if measured is not None:
        return measured
    factor, steps = FACTORS[name]
    seconds, latency = 0.0, 0.0
    unit = 1  # devices below this level
    inside = 1  # ranks of the group below this level
    for depth, level in enumerate(cluster.levels):
        below, unit = unit, unit * level.size
        here = members_per_unit(group, unit) if depth + 1 < len(cluster.levels) else n
        if here > inside:
            link = level.link
            busy = min(below, group.total)  # ranks behind one port
            groups = max(1, busy // inside)
            width = min(1.0, inside / link.ports if below > 1 else 1.0)
            bandwidth = link.bandwidth_bytes_per_s * link.efficiency * min(width, 1 / groups)
            hops = here // inside
            share = factor(n) * (inside if name == "all_to_all" else 1)
            seconds = max(seconds, share * size_bytes / bandwidth)
            ring = steps(hops)
            latency += link.latency_s * (ring if depth == 0 else min(ring, 2 * ceil(log2(hops))))
        inside = max(inside, here)
    return seconds + latency


def send_s(cluster: Cluster, size_bytes: float, stride: int, flows: int = 1) -> float:
    """Seconds of one message to the rank `stride` away, while `flows` ranks of its node send as well.

    Within a node every device has a port of its own; between nodes the senders share the node's ports, one each.
    """
    if size_bytes <= 0:
        return 0.0
    table = cluster.table("send", 2)
    if table is not None and stride < cluster.node_size:
        return table.seconds(size_bytes)
    unit = 1
    for level in cluster.levels:
        below, unit = unit, unit * level.size
        if stride < unit or level is cluster.levels[-1]:
            link = level.link
            width = 1.0 if below == 1 else min(1 / link.ports, 1 / max(1, min(flows, below)))
            return link.latency_s + size_bytes / (link.bandwidth_bytes_per_s * width)
    return 0.0


def _measured_s(cluster: Cluster, name: str, size_bytes: float, group: Group) -> float | None:
    """From the cluster's tables: the same collective, or an all-reduce scaled by the ring's factors; None beyond one node."""
    if cluster.ranks_per_node(group.total) < group.total:
        return None
    # Groups that work at once share the cores and the memory that move their bytes.
    crowd = max(1.0, (group.total / cluster.node_size) if group.total > group.size else 1.0)
    exact = cluster.table(name, group.size)
    if exact is not None:
        return exact.seconds(size_bytes) * crowd
    known = [t for t in cluster.tables if t.collective == "all_reduce"]
    if not known:
        return None
    near = min(known, key=lambda t: (abs(t.ranks - group.size), t.ranks))
    factor, steps = FACTORS[name]
    same, same_steps = FACTORS["all_reduce"]
    least = near.points[0][1]
    moved = near.seconds(size_bytes * factor(group.size) / same(near.ranks))
    return max(moved, least * steps(group.size) / same_steps(near.ranks)) * crowd
