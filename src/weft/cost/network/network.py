"""Seconds of a collective. In: a cluster, how many ranks take part and how far apart they are, bytes. Out: seconds.

Measured tables win where the cluster has them, then curves that were measured inside a node of that kind. Otherwise the least time over
the algorithms and protocols of the library that the links name (`Protocols`, from the catalogue; between processors gloo's): rings and
trees, with flags in the data (LL), in every 128 bytes (LL128) or apart (Simple), each a start, hops and a rate (Hockney's alpha-beta;
Patarasuk and Yuan 2009 for the ring's bytes), as NCCL itself chooses. Groups that communicate at the same time share their node's port.
Not modelled: in-network reduction between nodes, congestion behind the port, and a library that misjudges which protocol is fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

from weft.cluster.cluster import Cluster, Link
from weft.cost.calibration.efficiency import Protocols, protocols
from weft.errors import UsageError
from weft.plan.transition import LOCAL

# Bytes through one rank's port, as a part of the whole tensor, for n ranks; and the latencies in a row on a ring.
FACTORS: dict[str, tuple[Callable[[int], float], Callable[[int], float]]] = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "all_gather": (lambda n: (n - 1) / n, lambda n: n - 1),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: n - 1),
    "all_to_all": (lambda n: (n - 1) / n**2, lambda n: n - 1),
    "broadcast": (lambda n: 1.0, lambda n: n - 1),
    "ring": (lambda n: (n - 1) / n, lambda n: n - 1),  # pieces that all pass on to the next rank, n - 1 times
    # Of what a rank sends to its neighbours, which it sends at once.
    "halo_exchange": (lambda n: 1.0, lambda n: 1),
    "halo_add": (lambda n: 1.0, lambda n: 1),
    # Of the values that enter a region of branches, or leave it, all go at once: each takes its part of one exchange.
    "gather": (lambda n: (n - 1) / n / n, lambda n: 1 / n),
    "scatter": (lambda n: (n - 1) / n / n, lambda n: 1 / n),
}
FREE = LOCAL  # redistributions that move nothing


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


@dataclass(frozen=True, slots=True)
class Path:
    """How a group lies on the links: `inside` ranks of it a node, `nodes` nodes, the innermost link and the slowest one between
    nodes, and what one group gets of each, bytes/s."""

    inside: int
    nodes: int
    link: Link
    network: Link
    inside_bytes_per_s: float
    network_bytes_per_s: float


def members_per_unit(group: Group, unit: int) -> int:
    """Ranks of the group in one unit of `unit` consecutive devices: of one that lies across a border, where there is one."""
    if straddles(group, unit):
        return -(-group.size // 2)
    return max(1, min(group.size, unit // group.stride))


def straddles(group: Group, unit: int) -> bool:
    """Whether groups that would fit into a unit do not divide it, so that some lie across a border: 3 ranks each on nodes of 8.

    All wait for those in the end, so they are what counts.
    """
    span = group.size * group.stride
    return span <= unit < group.total and unit % span > 0


def ring_s(name: str, size_bytes: float, num_ranks: int, link: Link) -> float:
    """A ring of `num_ranks` over one link each: factor·S/bandwidth + steps·latency; all-reduce: 2(n-1)/n and 2(n-1)."""
    if num_ranks < 2:
        return 0.0
    factor, steps = FACTORS[name]
    return float(factor(num_ranks) * size_bytes / (link.bandwidth_bytes_per_s * link.efficiency) + steps(num_ranks) * link.latency_s)


def path(cluster: Cluster, group: Group) -> Path:
    """Where a group's bytes go. Each rank drives the ports next to it, and groups that work at once share them."""
    first = cluster.levels[0].link
    inside = here = members_per_unit(group, cluster.levels[0].size) if len(cluster.levels) > 1 else group.size
    network, slowest = first, float("inf")
    unit = cluster.levels[0].size
    for depth, level in enumerate(cluster.levels[1:], 1):
        below, unit = unit, unit * level.size
        reached = members_per_unit(group, unit) if depth + 1 < len(cluster.levels) else group.size
        if reached > here:
            link = level.link
            groups = group.stride if straddles(group, below) else max(1, min(below, group.total) // here)
            part = min(1.0, here / link.ports, 1 / groups)
            bandwidth = link.bandwidth_bytes_per_s * link.efficiency * part
            if bandwidth < slowest:
                network, slowest = link, bandwidth
            here = reached
    return Path(inside, -(-group.size // inside), first, network, first.bandwidth_bytes_per_s * first.efficiency, slowest)


def by_host(cluster: Cluster, group: Group) -> tuple[Group, Group]:
    """(the members of one node, those with the same place on every node); of a group inside one node, or with unequal numbers of members
    on its nodes: (one member, the group).

    >>> from weft.cluster.cluster import Cluster
    >>> [part.size for part in by_host(Cluster.parse("4xdgx-a100-40"), Group(16, 2))]
    [4, 4]
    """
    where, unit = path(cluster, group), cluster.levels[0].size
    if len(cluster.levels) == 1 or where.nodes == 1 or where.inside * where.nodes != group.size or straddles(group, unit):
        return Group(1), group
    inside = Group(where.inside, group.stride, max(where.inside * group.stride, min(unit, group.total)))
    return inside, Group(where.nodes, group.stride * where.inside, group.total)


def collective_s(cluster: Cluster, name: str, size_bytes: float, group: Group, rules: Protocols | None = None) -> float:
    """Seconds of collective `name` on a tensor of `size_bytes` in all (its whole, however it is cut) in every group at once.

    `rules` replaces those that the links name, for fitting them.

    >>> from weft.cluster.cluster import Cluster
    >>> round(1e3 * collective_s(Cluster.parse("dgx-a100-40"), "all_reduce", 2**30, Group(8)), 1)
    8.9

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
    where = path(cluster, group)
    link = where.link if where.nodes == 1 else where.network
    rules = rules or protocols(cluster.kind.library or link.protocol)  # NCCL's rules are for GPUs
    return (_inside_s if where.nodes == 1 else _between_s)(name, size_bytes, n, where, rules)


def _inside_s(name: str, size_bytes: float, n: int, where: Path, rules: Protocols) -> float:
    """Rings within a node. LL's rate is that of one rank's piece, since it uses more channels the more ranks there are."""
    factor, steps = FACTORS[name]
    if (curve := rules.curve(name, n)) is not None:
        # Among other numbers of ranks: as many bytes through each port, as many steps more.
        least = curve.points[0][1]
        moved = curve.seconds(size_bytes * factor(n) / factor(curve.ranks))
        return max(moved, least * steps(n) / steps(curve.ranks))
    latency, bandwidth = where.link.latency_s, where.inside_bytes_per_s
    low, high = rules.node_ll, rules.node_simple
    moved = factor(n) * size_bytes
    small = latency * (low.start + low.hop * steps(n)) + moved / (n - 1) / (low.rate * bandwidth)
    large = latency * (high.start + high.hop * steps(n)) + moved / (high.rate * bandwidth)
    return float(min(small, large))


def _between_s(name: str, size_bytes: float, n: int, where: Path, rules: Protocols) -> float:
    """Rings and trees over nodes. An all-reduce may be a tree, up and down in log2(nodes) hops; the others are rings."""
    factor, _ = FACTORS[name]
    through_node = factor(n) * size_bytes / where.inside_bytes_per_s if where.inside > 1 else 0.0
    return float(max(through_node, min(_lines_between(name, size_bytes, n, where, rules).values())))


def _lines_between(name: str, size_bytes: float, n: int, where: Path, rules: Protocols) -> dict[str, float]:
    """Seconds over nodes by algorithm and protocol."""
    factor, steps = FACTORS[name]
    latency, bandwidth, nodes = where.network.latency_s, where.network_bytes_per_s, where.nodes
    moved = factor(n) * size_bytes
    if name == "all_to_all":
        moved *= where.inside
    up = log2(nodes) if name == "all_reduce" else float(nodes - 1)
    lines = {}
    for key, line in (("LL", rules.net_ll), ("LL128", rules.net_ll128), *([("Simple", rules.net_tree)] if name == "all_reduce" else [])):
        # What passes a node's port: both ways along the tree's edges, or less what a root and leaves need not.
        saved = rules.tree_saved if key == "Simple" else 0.0
        carried = 2 * size_bytes * (1 - saved / nodes) if name == "all_reduce" else moved
        lines[f"tree {key}"] = latency * (line.start + line.hop * up) + carried / (line.rate * bandwidth)
    ring = rules.net_ring
    part = steps(n) / (2 * (n - 1))
    hops = 2 * part * ((nodes - 1) * latency + (n - nodes) * where.link.latency_s)
    lines["ring"] = latency * ring.start + ring.hop * hops + moved / (ring.rate * bandwidth)
    return lines


def library_lines(cluster: Cluster, size_bytes: float, group: Group) -> dict[str, float]:
    """Seconds of an all-reduce over nodes by what the library may use, of which it takes the least: trees of three protocols, and rings.

    >>> from weft.cluster.cluster import Cluster
    >>> lines = library_lines(Cluster.parse("8xdgx-a100-40"), 2**30, Group(64))
    >>> min(lines, key=lines.__getitem__)
    'ring'

    Raises:
        UsageError: a group inside one node, where there are only rings.
    """
    where = path(cluster, group)
    if where.nodes == 1:
        raise UsageError(f"{group.size} ranks of {cluster.name} are on one node, where all are rings; name more ranks")
    return _lines_between("all_reduce", size_bytes, group.size, where, protocols(cluster.kind.library or where.network.protocol))


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
            return link.latency_s + size_bytes / (link.bandwidth_bytes_per_s * link.efficiency * width)
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
    tables = [t for t in cluster.tables if t.collective == "all_reduce"]
    if not tables:
        return None
    near = min(tables, key=lambda t: (abs(t.ranks - group.size), t.ranks))
    factor, steps = FACTORS[name]
    traffic, steps_taken = FACTORS["all_reduce"]
    least = near.points[0][1]
    moved = near.seconds(size_bytes * factor(group.size) / traffic(near.ranks))
    return max(moved, least * steps(group.size) / steps_taken(near.ranks)) * crowd
