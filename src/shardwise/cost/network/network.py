"""Cost model of collectives (all-reduce, all-gather, reduce-scatter, all-to-all ...) and sends. In: a cluster, a rank group, bytes.

Tables measured on the cluster take precedence, then curves measured inside a node of that kind. Otherwise the minimum over the
algorithms and protocols of the library that the links name (`Protocols`, from the catalogue; gloo's between CPUs): rings and
trees, with flags in the data (LL), in every 128 bytes (LL128) or separate (Simple), each a start, hops and a rate (Hockney's alpha-beta;
Patarasuk and Yuan 2009 for the ring's bytes), as NCCL itself chooses. Groups that communicate concurrently share their node's port.
Not modelled: in-network reduction between nodes, congestion beyond the port, and a library that misjudges which protocol is fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from shardwise.cluster.cluster import Cluster, NetworkLink
from shardwise.cost.calibration.efficiency import Protocols, protocols_named
from shardwise.errors import UsageError
from shardwise.plan.ir.transition import LOCAL_COLLECTIVES

# Bytes through one rank's port as a fraction of the full tensor, for n ranks; and the number of sequential latencies on a ring.
FACTORS: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "all_gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_to_all": (lambda n: (n - 1) / n**2, lambda n: n - 1),
    "broadcast": (lambda n: 1.0, lambda n: n - 1),
    "ring": (lambda n: (n - 1) / n, lambda n: n - 1),  # ring attention: every rank passes shards to the next, n - 1 times
    # Relative to a rank's messages to its neighbours, which it sends at once.
    "halo_exchange": (lambda n: 1.0, lambda n: 1),
    "halo_add": (lambda n: 1.0, lambda n: 1),
    # All values that enter or leave a region of branches move at once: each takes its share of one exchange.
    "gather": (lambda n: (n - 1) / n / n, lambda n: 1 / n),
    "scatter": (lambda n: (n - 1) / n / n, lambda n: 1 / n),
}
FREE_MOVES = LOCAL_COLLECTIVES  # redistributions without communication


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A group of `size` ranks with `stride` in a job of `num_ranks`; all groups of this shape communicate concurrently."""

    size: int
    stride: int = 1
    num_ranks: int = 0

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1 or (self.num_ranks and self.num_ranks < self.size):
            raise UsageError(f"a group of {self.size} ranks, {self.stride} apart, of {self.num_ranks} does not exist")

    @property
    def total(self) -> int:
        return max(self.num_ranks, self.size * self.stride)


@dataclass(frozen=True, slots=True)
class GroupPath:
    """A group on the links: `inside` of its ranks per node, `nodes` nodes, the innermost link and the slowest one between
    nodes, and the bandwidth that one group gets of each, bytes/s."""

    inside: int
    nodes: int
    link: NetworkLink
    network: NetworkLink
    inside_bytes_per_s: float
    network_bytes_per_s: float


def members_per_unit(group: RankGroup, unit: int) -> int:
    """Return the ranks of the group in one unit of `unit` consecutive devices; for a group across units, half of it."""
    if straddles_units(group, unit):
        return -(-group.size // 2)
    return max(1, min(group.size, unit // group.stride))


def straddles_units(group: RankGroup, unit: int) -> bool:
    """Return whether groups that fit into a unit do not divide it, so that some cross a unit's end: 3 ranks each on nodes of 8.

    All groups eventually wait for those, so they determine the time.
    """
    span = group.size * group.stride
    return span <= unit < group.total and unit % span > 0


def ring_s(name: str, size_bytes: float, num_ranks: int, link: NetworkLink) -> float:
    """Seconds on a ring of `num_ranks` over one link each: factor·S/bandwidth + steps·latency; all-reduce: 2(n-1)/n and 2(n-1)."""
    if num_ranks < 2:
        return 0.0
    factor, steps = FACTORS[name]
    return float(factor(num_ranks) * size_bytes / (link.bandwidth_bytes_per_s * link.efficiency) + steps(num_ranks) * link.latency_s)


def group_path(cluster: Cluster, group: RankGroup) -> GroupPath:
    """Return the links that a group uses. Each rank drives the ports next to it, and concurrent groups share them."""
    first = cluster.levels[0].link
    inside = here = members_per_unit(group, cluster.levels[0].size) if len(cluster.levels) > 1 else group.size
    network, slowest = first, float("inf")
    unit = cluster.levels[0].size
    for depth, level in enumerate(cluster.levels[1:], 1):
        below, unit = unit, unit * level.size
        reached = members_per_unit(group, unit) if depth + 1 < len(cluster.levels) else group.size
        if reached > here:
            link = level.link
            groups = group.stride if straddles_units(group, below) else max(1, min(below, group.total) // here)
            part = min(1.0, here / link.ports, 1 / groups)
            bandwidth = link.bandwidth_bytes_per_s * link.efficiency * part
            if bandwidth < slowest:
                network, slowest = link, bandwidth
            here = reached
    return GroupPath(inside, -(-group.size // inside), first, network, first.bandwidth_bytes_per_s * first.efficiency, slowest)


def split_by_host(cluster: Cluster, group: RankGroup) -> tuple[RankGroup, RankGroup]:
    """Split a group into (its ranks on one node, its ranks with equal local index on all nodes); if it is inside one node, or has unequal
    numbers of ranks on its nodes: (one rank, the group).

    >>> from shardwise.cluster.cluster import Cluster
    >>> [part.size for part in split_by_host(Cluster.parse("4xdgx-a100-40"), RankGroup(16, 2))]
    [4, 4]
    """
    route, unit = group_path(cluster, group), cluster.levels[0].size
    if len(cluster.levels) == 1 or route.nodes == 1 or route.inside * route.nodes != group.size or straddles_units(group, unit):
        return RankGroup(1), group
    inside = RankGroup(route.inside, group.stride, max(route.inside * group.stride, min(unit, group.total)))
    return inside, RankGroup(route.nodes, group.stride * route.inside, group.total)


def collective_s(cluster: Cluster, name: str, size_bytes: float, group: RankGroup, rules: Protocols | None = None) -> float:
    """Seconds of collective `name` on a full (unsharded) tensor of `size_bytes`, in all groups concurrently.

    `rules` replaces the protocols that the links name, for fitting them.

    >>> from shardwise.cluster.cluster import Cluster
    >>> round(1e3 * collective_s(Cluster.parse("dgx-a100-40"), "all_reduce", 2**30, RankGroup(8)), 1)
    8.9

    Raises:
        UsageError: an unknown collective.
    """
    n = group.size
    if name in FREE_MOVES or n < 2 or size_bytes <= 0:
        return 0.0
    if name not in FACTORS:
        raise UsageError(f"unknown collective {name}; known: {', '.join(FACTORS)}")
    measured = _measured_s(cluster, name, size_bytes, group)
    if measured is not None:
        return measured
    route = group_path(cluster, group)
    link = route.link if route.nodes == 1 else route.network
    rules = rules or protocols_named(cluster.kind.library or link.protocol)  # NCCL is for GPUs
    return (_intra_node_s if route.nodes == 1 else _inter_node_s)(name, size_bytes, n, route, rules)


def _intra_node_s(name: str, size_bytes: float, n: int, where: GroupPath, rules: Protocols) -> float:
    """Seconds of rings within a node. LL's rate is that of one rank's chunk, since it uses more channels the more ranks there are."""
    factor, steps = FACTORS[name]
    if (curve := rules.curve(name, n)) is not None:
        # For other numbers of ranks: scaled to as many bytes through each port, and at least to as many steps.
        least = curve.points[0][1]
        moved = curve.seconds(size_bytes * factor(n) / factor(curve.ranks))
        return max(moved, least * steps(n) / steps(curve.ranks))
    latency, bandwidth = where.link.latency_s, where.inside_bytes_per_s
    low, high = rules.node_ll, rules.node_simple
    moved = factor(n) * size_bytes
    small = latency * (low.start + low.hop * steps(n)) + moved / (n - 1) / (low.rate * bandwidth)
    large = latency * (high.start + high.hop * steps(n)) + moved / (high.rate * bandwidth)
    return float(min(small, large))


def _inter_node_s(name: str, size_bytes: float, n: int, where: GroupPath, rules: Protocols) -> float:
    """Seconds of rings and trees over nodes. An all-reduce may be a tree, up and down in log2(nodes) hops; the others are rings."""
    factor, _ = FACTORS[name]
    through_node = factor(n) * size_bytes / where.inside_bytes_per_s if where.inside > 1 else 0.0
    return float(max(through_node, min(_inter_node_times(name, size_bytes, n, where, rules).values())))


def _inter_node_times(name: str, size_bytes: float, n: int, where: GroupPath, rules: Protocols) -> dict[str, float]:
    """Return seconds over nodes by algorithm and protocol."""
    factor, steps = FACTORS[name]
    latency, bandwidth, nodes = where.network.latency_s, where.network_bytes_per_s, where.nodes
    moved = factor(n) * size_bytes
    if name == "all_to_all":
        moved *= where.inside
    tree_hops = log2(nodes) if name == "all_reduce" else float(nodes - 1)
    times = {}
    for key, line in (("LL", rules.net_ll), ("LL128", rules.net_ll128), *([("Simple", rules.net_tree)] if name == "all_reduce" else [])):
        # Bytes through a node's port: both ways along the tree's edges, less what roots and leaves need not send.
        saved = rules.tree_saved if key == "Simple" else 0.0
        carried = 2 * size_bytes * (1 - saved / nodes) if name == "all_reduce" else moved
        times[f"tree {key}"] = latency * (line.start + line.hop * tree_hops) + carried / (line.rate * bandwidth)
    ring = rules.net_ring
    part = steps(n) / (2 * (n - 1))
    hops = 2 * part * ((nodes - 1) * latency + (n - nodes) * where.link.latency_s)
    times["ring"] = latency * ring.start + ring.hop * hops + moved / (ring.rate * bandwidth)
    return times


def library_times(cluster: Cluster, size_bytes: float, group: RankGroup) -> dict[str, float]:
    """Return seconds of an all-reduce over nodes by the library's choices (trees of three protocols, rings), of which it uses the fastest.

    >>> from shardwise.cluster.cluster import Cluster
    >>> lines = library_times(Cluster.parse("8xdgx-a100-40"), 2**30, RankGroup(64))
    >>> min(lines, key=lines.__getitem__)
    'ring'

    Raises:
        UsageError: a group inside one node, which only uses rings.
    """
    route = group_path(cluster, group)
    if route.nodes == 1:
        raise UsageError(f"{group.size} ranks of {cluster.name} are on one node, where all are rings; name more ranks")
    return _inter_node_times("all_reduce", size_bytes, group.size, route, protocols_named(cluster.kind.library or route.network.protocol))


def send_s(cluster: Cluster, size_bytes: float, stride: int, flows: int = 1) -> float:
    """Seconds of one message to the rank `stride` away, while `flows` ranks of its node send as well.

    Within a node every device has its own port; between nodes the senders share the node's ports, one each.
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
            return link.latency_s + size_bytes / (link.bandwidth_bytes_per_s * link.efficiency * width)
    return 0.0


def _measured_s(cluster: Cluster, name: str, size_bytes: float, group: RankGroup) -> float | None:
    """Return seconds from the cluster's tables: of the collective, or of all-reduce scaled by ring factors; None beyond one node."""
    if cluster.ranks_per_node(group.total) < group.total:
        return None
    # Concurrent groups share the cores and the memory that move their bytes.
    crowd = max(1.0, (group.total / cluster.node_size) if group.total > group.size else 1.0)
    exact = cluster.table(name, group.size)
    if exact is not None:
        return exact.seconds(size_bytes) * crowd
    tables = [t for t in cluster.tables if t.collective == "all_reduce"]
    if not tables:
        return None
    nearest = min(tables, key=lambda t: (abs(t.ranks - group.size), t.ranks))
    factor, steps = FACTORS[name]
    traffic, steps_taken = FACTORS["all_reduce"]
    least = nearest.points[0][1]
    moved = nearest.seconds(size_bytes * factor(group.size) / traffic(nearest.ranks))
    return max(moved, least * steps(group.size) / steps_taken(nearest.ranks)) * crowd
