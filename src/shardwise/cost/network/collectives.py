"""Seconds of every all-reduce algorithm (ring, tree, recursive halving-doubling ...), as a program of messages and as the library's own,
and the fastest by message size (`choose_algorithms`, for `all_reduce=auto`). In: a cluster, a rank group, bytes.

A program's time is a closed form over its hops, so that 16,384 ranks cost as little as two; it equals a run of the program in
`shardwise.simulate.messages` (`tests/pure/cost/test_cost_collectives.py` compares the two) on links of one speed, except for ranks that
are no
power of two (the order of messages at a port decides: within a fifth) and `double_tree`, which interpolates counts of its programs
(at most a quarter more). Over nodes `naive` and `double_tree` are estimates (within a quarter).

On a measured machine (`shardwise probe`) a hop is the measured time of messages between its ranks, Python and contention for cores
included, and the measured slowdown of whole programs over their hops at some sizes is applied at others. Not modelled: more than two
levels of links (the slowest beyond the node stands for all), nodes that are not full (they count as full), and in-switch reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import ceil, log2

from shardwise.cluster.cluster import Cluster, MeasuredTable, NetworkLink
from shardwise.cost.network.network import RankGroup, collective_s, group_path
from shardwise.errors import UsageError
from shardwise.plan.ir.choice import NATIVE, AllReduceChoices

MIN_BYTES, MAX_BYTES = 256, 1 << 30  # bytes between which `choose_algorithms` looks for crossings
MARGIN = 0.1  # gain that a program must have over the library's own: predictions are no better, and the library's is simpler
BYTES_PER_ADDED_BYTE = 3.0  # bytes of memory moved to add a byte: two are read, one is written
# A double tree in 8 chunks per tree: ranks -> (messages, latencies, additions) on the critical path, counted on the programs.
DOUBLE_TREE = {2: (32, 19, 29), 4: (48, 26, 29), 8: (55, 32, 31), 16: (66, 38, 35), 32: (74, 43, 39), 64: (82, 48, 43), 128: (92, 54, 47)}
DOUBLE_PIECES = 16
PART_BYTES = 4 << 20  # chunk that crosses hosts while the next one is reduced inside them


@dataclass(frozen=True, slots=True)
class Hop:
    """Cost of a message between two ranks: it occupies both ends for `message_s` plus `byte_s` per byte and arrives `latency_s` later;
    adding received data takes `add_byte_s` per byte. Affine, or measured: `one_way` and `exchange` are then times of whole messages by
    the number of concurrent ranks, `addition` of additions, `steps` the overhead of each message of a program.
    """

    latency_s: float
    byte_s: float
    message_s: float = 0.0
    add_byte_s: float = 0.0
    one_way: tuple[MeasuredTable, ...] = ()
    exchange: tuple[MeasuredTable, ...] = ()
    addition: tuple[MeasuredTable, ...] = ()
    steps: tuple[MeasuredTable, ...] = ()
    threads: int = 0

    def step_s(self, ranks: int) -> float:
        """Seconds that a message of a program takes more than a single one."""
        return _seconds_at(self.steps, 1.0, ranks, self.threads) if self.steps else 0.0

    def one_way_s(self, size_bytes: float, ranks: int = 2) -> float:
        """Seconds until a message has arrived, while half of `ranks` send and the others receive."""
        if self.one_way:
            return _seconds_at(self.one_way, size_bytes, ranks, self.threads) + self.step_s(ranks)
        return self.busy_s(size_bytes) + self.latency_s

    def exchange_s(self, size_bytes: float, ranks: int = 2) -> float:
        """Seconds until it has arrived if each of `ranks` ranks sends one and receives one."""
        if self.exchange:
            return _seconds_at(self.exchange, size_bytes, ranks, self.threads) + self.step_s(ranks)
        return self.busy_s(size_bytes) + self.latency_s

    def busy_s(self, size_bytes: float, ranks: int = 2) -> float:
        """Seconds for which a message occupies its ends: the next one starts then."""
        if self.exchange:
            return max(self.message_s, self.exchange_s(size_bytes, ranks) - self.latency_s)
        return self.message_s + size_bytes * self.byte_s

    def add_s(self, size_bytes: float, ranks: int = 2) -> float:
        """Seconds of adding received data, on `ranks` ranks at once."""
        return _seconds_at(self.addition, size_bytes, ranks, self.threads) if self.addition else size_bytes * self.add_byte_s


@dataclass(frozen=True, slots=True)
class GroupHops:
    """Hops of a group: `inside` ranks per node over `near`, `nodes` nodes over `far`. `queue`: messages of the group that pass a node's
    port sequentially when all of its ranks there send to other nodes. `call_s`: start time of a program."""

    near: Hop
    far: Hop
    inside: int
    nodes: int = 1
    queue: float = 1.0
    call_s: float = 0.0

    @property
    def size(self) -> int:
        return self.inside * self.nodes

    def exchange_s(self, size_bytes: float, distance: int, add: bool) -> float:
        """Seconds of one step in which every rank exchanges with the one `distance` away."""
        hop = self.near if distance < self.inside else self.far
        add_s = hop.add_s(size_bytes, self.size) if add else 0.0
        if distance < self.inside:
            return hop.exchange_s(size_bytes, self.size) + add_s
        # Ranks that waited for the port also start their next step later: only the port counts if it is the bottleneck.
        return max(self.queue * hop.busy_s(size_bytes, self.size), hop.exchange_s(size_bytes, self.size) + add_s)


def all_reduce_s(name: str, size_bytes: float, ways: GroupHops) -> float:
    """Seconds of the program `name` of `shardwise.collectives` with its default chunks.

    >>> hop = Hop(0.0, 1.0)
    >>> all_reduce_s("ring", 1.0, GroupHops(hop, hop, 4))
    1.5

    Raises:
        UsageError: an unknown algorithm.
    """
    if name not in CLOSED_FORMS:
        raise UsageError(f"no closed form of {name}; known: {', '.join(CLOSED_FORMS)}")
    return ways.call_s + CLOSED_FORMS[name](size_bytes, ways) if ways.size > 1 else 0.0


def _ring_s(size: float, w: GroupHops) -> float:
    n, part = w.size, size / w.size
    near, added = w.near.exchange_s(part, n), (n - 1) * w.near.add_s(part, n)
    steps = 2 * (n - 1)
    if w.nodes == 1:
        return steps * near + added
    # The critical path is a chunk's way round the ring, or the slowest edge, which all chunks pass sequentially.
    crossings = ceil(steps / w.inside)
    around = crossings * w.far.exchange_s(part, n) + (steps - crossings) * near + added
    return max(around, steps * w.far.busy_s(part, n) + w.far.latency_s)


def _naive_s(size: float, w: GroupHops) -> float:
    n = w.size
    busy, added = w.near.busy_s(size, n), w.near.add_s(size, n)
    if w.nodes == 1:
        if w.near.exchange:  # ranks that share cores alternate between moving and adding
            return (n - 1) * (w.near.exchange_s(size, n) + added)
        return w.near.latency_s + _pipelined_s(busy, added, n - 1)
    far = w.far.busy_s(size, n)
    send_s = max((w.inside - 1) * busy + (n - w.inside) * far, w.queue * (n - w.inside) * far)
    return max(send_s, (n - 1) * added) + w.far.latency_s + min(added, far)


def _parameter_server_s(size: float, w: GroupHops) -> float:
    return sum(push_pull_s(size, w, 1))


def push_pull_s(size_bytes: float, ways: GroupHops, servers: int) -> tuple[float, float]:
    """Seconds (until all gradients are pushed and added, until all weights are pulled) with parameter servers that each have an equal
    shard: a server's port receives all pushes sequentially, and sends all pulls. Servers of one node share its port.

    >>> hop = Hop(0.0, 1.0)
    >>> push_pull_s(6.0, GroupHops(hop, hop, 4), 1), push_pull_s(6.0, GroupHops(hop, hop, 4), 3)
    ((18.0, 18.0), (6.0, 6.0))
    """
    n, part = ways.size, size_bytes / servers
    busy, added = ways.near.one_way_s(part) - ways.near.latency_s, ways.near.add_s(part)
    if ways.nodes == 1:
        return ways.near.latency_s + _pipelined_s(busy, added, n - 1), ways.near.latency_s + (n - 1) * busy
    shared = max(1.0, min(ceil(servers / ways.nodes), ways.queue))
    through = (ways.inside - 1) * busy + shared * (n - ways.inside) * (ways.far.one_way_s(part) - ways.far.latency_s)
    return through + ways.far.latency_s + max(added, (n - 1) * added - through), through + ways.far.latency_s


def _pipelined_s(busy: float, added: float, count: int) -> float:
    """Seconds of `count` sequential messages, each added while the next one arrives."""
    return max(busy + count * added, count * busy + added)


def _tree_s(size: float, w: GroupHops) -> float:
    """Seconds up the binomial tree and down. A rank's subtree of level i has 2^i ranks, or the remaining ones."""
    n = w.size
    top = (n - 1).bit_length()
    up: dict[tuple[int, int], float] = {}
    down: dict[tuple[int, int], float] = {}

    def hop(level: int) -> Hop:
        return w.near if 1 << level < w.inside else w.far

    def below(level: int, count: int) -> list[tuple[int, int]]:
        """Return children's levels and sizes in a subtree of `count` ranks, the smallest level first."""
        return [(i, min(1 << i, count - (1 << i))) for i in range(level) if 1 << i < count]

    def ready(level: int, count: int) -> float:
        if (level, count) not in up:
            free = ready_s = 0.0
            for when, i in sorted((ready(*child), child[0]) for child in below(level, count)):
                pairs = max(1, n >> (i + 1))
                hop_ = hop(i)
                free = max(free, when) + (hop_.busy_s(size, 2 * pairs) if not hop_.one_way else 0.0)
                came = free + hop_.latency_s if not hop_.one_way else max(free, when) + hop_.one_way_s(size, 2 * pairs)
                free = max(free, came - hop_.latency_s)
                ready_s = max(ready_s, came) + hop_.add_s(size, pairs)
            up[level, count] = ready_s
        return up[level, count]

    def reached(level: int, count: int) -> float:
        if (level, count) not in down:
            free = end_s = 0.0
            for i, ranks in sorted(below(level, count), key=lambda child: (_tree_height(child[1]), child[0]), reverse=True):
                hop_ = hop(i)
                came = free + hop_.one_way_s(size, 2 * max(1, n >> (i + 1)))
                free = came - hop_.latency_s
                end_s = max(end_s, came + reached(i, ranks))
            down[level, count] = end_s
        return down[level, count]

    return ready(top, n) + reached(top, n)


def _tree_height(count: int) -> int:
    """Return the number of links from the root of a binomial tree of `count` ranks to its farthest leaf."""
    return max((bin(rank).count("1") for rank in (count - 1, (1 << (count.bit_length() - 1)) - 1)), default=0)


def _double_tree_s(size: float, w: GroupHops) -> float:
    part = size / DOUBLE_PIECES
    near = _one_link_double_tree_s(part, w.inside, w.near, w.size)
    if w.nodes == 1:
        return near
    # Neighbours in a tree are neighbours in rank, except at the top of the tree.
    top = _one_link_double_tree_s(part, w.size, w.far, w.size) - _one_link_double_tree_s(part, max(2, w.inside), w.far, w.size)
    crossing, _, _ = double_tree_counts(w.nodes)
    through = crossing if w.queue > 1 else 2 / 3 * crossing  # the two trees cross concurrently if ranks have their own ports
    return near + max(top, through * w.far.busy_s(part, w.size) + 2 * log2(w.nodes) * w.far.latency_s)


def _one_link_double_tree_s(part: float, ranks: int, hop: Hop, at_once: int) -> float:
    if ranks < 2:
        return 0.0
    messages, latencies, additions = double_tree_counts(ranks)
    if hop.exchange:
        # A measured exchange is a message of every rank at once: half of a rank's messages, or the mean number that it sends.
        messages = max(messages / 2, 2 * DOUBLE_PIECES * (ranks - 1) / ranks)
    return messages * hop.busy_s(part, at_once) + latencies * hop.latency_s + additions * hop.add_s(part, at_once)


def double_tree_counts(num_ranks: int) -> tuple[float, float, float]:
    """Return (messages, latencies, additions) on the critical path; from 128 ranks on each doubling adds as many as the last one."""
    counts = sorted(DOUBLE_TREE)
    lower = max([n for n in counts if n <= num_ranks][-1:] or [counts[0]])
    index = min(counts.index(lower), len(counts) - 2)
    part = log2(num_ranks / counts[index])
    a, b = DOUBLE_TREE[counts[index]], DOUBLE_TREE[counts[index + 1]]
    x, y, z = (low + part * (high - low) for low, high in zip(a, b, strict=True))
    return x, y, z


def _recursive_doubling_s(size: float, w: GroupHops) -> float:
    core = 1 << (w.size.bit_length() - 1)
    total = sum(w.exchange_s(size, 1 << i, True) for i in range(core.bit_length() - 1)) + _fold_s(size, w, core, size)
    # If at most half of them are folded, the others' sums have arrived by then.
    early = w.near.latency_s if 0 < w.size - core <= core // 2 else 0.0
    return total - early


def _halving_doubling_s(size: float, w: GroupHops) -> float:
    core = 1 << (w.size.bit_length() - 1)
    total = _fold_s(size, w, core, size / 2)
    for i in range(core.bit_length() - 1):  # halves are exchanged with the farthest ranks, whose numbers differ in the top bit
        part, distance = size / (core >> i), 1 << i
        total += w.exchange_s(part, distance, True) + w.exchange_s(part, distance, False)
    return total


def _fold_s(size: float, w: GroupHops, core: int, first: float) -> float:
    """Seconds of folding: ranks beyond a power of two send their data to the first ones, after their `first` bytes, and get the sum."""
    if core == w.size:
        return 0.0
    hop = w.far if w.nodes > 1 else w.near
    ranks = 2 * (w.size - core)
    return 2 * hop.one_way_s(size, ranks) + hop.add_s(size, ranks // 2) + hop.busy_s(first, ranks)


def _hierarchical_s(size: float, w: GroupHops) -> float:
    """Seconds of rings inside nodes, then of every rank's shard between nodes, then of rings inside."""
    intra_node_s = 0.0
    if w.inside > 1:
        part = size / w.inside
        intra_node_s = (w.inside - 1) * (2 * w.near.exchange_s(part, w.size) + w.near.add_s(part, w.size))
    if w.nodes == 1:
        return intra_node_s
    part, steps = size / w.size, w.nodes - 1
    busy, met, added = w.far.busy_s(part, w.size), w.far.exchange_s(part, w.size), w.far.add_s(part, w.size)
    inter_node_s = steps * (max(w.queue * busy, met + added) + max(w.queue * busy, met))
    return intra_node_s + inter_node_s + (w.queue - 1) * busy + (w.far.latency_s if w.queue * busy > met else 0.0)


CLOSED_FORMS: Mapping[str, Callable[[float, GroupHops], float]] = {
    "parameter_server": _parameter_server_s,
    "naive": _naive_s,
    "ring": _ring_s,
    "tree": _tree_s,
    "double_tree": _double_tree_s,
    "recursive_doubling": _recursive_doubling_s,
    "halving_doubling": _halving_doubling_s,
    "hierarchical": _hierarchical_s,
}


def hops_of(cluster: Cluster, group: RankGroup, transport: str = "") -> GroupHops:
    """Return the hops of a group on a cluster. `transport`: "gloo" for gloo instead of shared memory between ranks of a host."""
    route = group_path(cluster, group)
    add_byte_s = BYTES_PER_ADDED_BYTE / cluster.speed(group.total).memory_bandwidth_bytes_per_s
    near = _link_hop(route.link, 1, cluster.device.launch_s, add_byte_s)
    call_s = 0.0
    if cluster.kind.prices_programs:
        means = transport if route.nodes == 1 else cluster.kind.library
        near = _with_measurements(cluster, near, means)
        calls = _tables_named(cluster, f"call.{means}" if means else "call")
        call_s = _seconds_at(calls, 1.0, group.size, cluster.node_size) if calls else 0.0
    if route.nodes == 1:
        return GroupHops(near, near, group.size, call_s=call_s)
    # Concurrent groups share the ports: the messages of one rank of each pass them together.
    groups = max(1, min(cluster.node_size, group.total) // route.inside)
    shared = max(1.0, groups / route.network.ports)
    far = _link_hop(route.network, route.network.ports, cluster.device.launch_s, add_byte_s)
    far = replace(far, byte_s=far.byte_s * shared)
    if near.one_way:  # measured cost in the hosts, limited by the network
        far = replace(
            near, latency_s=far.latency_s, one_way=_limit_by_network(near.one_way, far), exchange=_limit_by_network(near.exchange, far)
        )
    queue = max(1.0, route.inside * groups / route.network.ports)
    return GroupHops(near, far, route.inside, route.nodes, queue / shared, call_s)


def _link_hop(link: NetworkLink, ports: int, message_s: float, add_byte_s: float) -> Hop:
    return Hop(link.latency_s, ports / (link.bandwidth_bytes_per_s * link.efficiency), message_s, add_byte_s)


def _with_measurements(cluster: Cluster, hop: Hop, transport: str) -> Hop:
    """Return the hop with the measurements of `shardwise probe`, if there are any."""
    suffix = f".{transport}" if transport else ""
    one_way, exchange, adding, steps = (
        _tables_named(cluster, name) for name in (f"send{suffix}", f"exchange{suffix}", "add", f"step{suffix}")
    )
    if not one_way or not exchange:
        return hop
    # Half of the smallest message is latency; the other half is Python at both ends.
    latency = min(table.points[0][1] for table in one_way) / 2
    return replace(hop, latency_s=latency, message_s=latency, one_way=one_way, exchange=exchange, addition=adding, steps=steps,
                   threads=cluster.node_size)  # fmt: skip


def _tables_named(cluster: Cluster, name: str) -> tuple[MeasuredTable, ...]:
    return tuple(table for table in cluster.tables if table.collective == name)


def _nearest_table(tables: tuple[MeasuredTable, ...], ranks: int) -> MeasuredTable:
    """Return the table with the nearest number of ranks, the smaller of two."""
    return min(tables, key=lambda table: (abs(log2(table.ranks / max(1, ranks))), table.ranks))


def _limit_by_network(tables: tuple[MeasuredTable, ...], far: Hop) -> tuple[MeasuredTable, ...]:
    return tuple(replace(t, points=tuple((size, max(s, far.one_way_s(size))) for size, s in t.points)) for t in tables)


def _seconds_at(tables: tuple[MeasuredTable, ...], size_bytes: float, ranks: int, threads: int) -> float:
    """Seconds with `ranks` ranks: of the nearest measured number, slowed down if more ranks share the cores."""
    nearest = _nearest_table(tables, ranks)
    oversubscription = max(1.0, ranks / max(nearest.ranks, threads)) if ranks > nearest.ranks else 1.0
    return nearest.seconds(size_bytes) * oversubscription


def native_s(cluster: Cluster, size_bytes: float, group: RankGroup, transport: str = "") -> float:
    """Seconds of the library's own all-reduce: measured, or from its protocols."""
    table = cluster.table(f"all_reduce.{transport}", group.size) if transport else None
    if table is not None and cluster.ranks_per_node(group.total) >= group.total:
        return table.seconds(size_bytes)
    return collective_s(cluster, "all_reduce", size_bytes, group)


def algorithm_times(cluster: Cluster, group: RankGroup, transport: str = "") -> dict[str, Callable[[float], float]]:
    """Return seconds as a function of bytes by algorithm, with the library's own as `native`, without those that do not fit the group.

    >>> times = algorithm_times(Cluster.parse("8xdgx-a100-80"), RankGroup(64))
    >>> times["ring"](2**30) < times["naive"](2**30)
    True
    """
    hops = hops_of(cluster, group, transport)
    by_name: dict[str, Callable[[float], float]] = {NATIVE: partial(_native_time, cluster, group, transport)}
    for name in CLOSED_FORMS:
        if name != "hierarchical":
            by_name[name] = _program_time(name, cluster, hops, transport)
    if hops.inside > 1 and hops.nodes > 1:
        by_name["hierarchical"] = (
            partial(_hierarchical_by_memory_s, cluster, group)
            if cluster.kind.prices_programs
            else partial(all_reduce_s, "hierarchical", ways=hops)
        )
    return by_name


def _program_time(name: str, cluster: Cluster, hops: GroupHops, transport: str) -> Callable[[float], float]:
    """Return a program's seconds by bytes: those of its hops, times its measured slowdown at the nearest number of ranks."""
    closed_form = partial(all_reduce_s, name, ways=hops)
    measured = _tables_named(cluster, f"program.{name}.{transport}" if transport else f"program.{name}")
    if hops.nodes > 1 or not measured:
        return closed_form
    nearest = _nearest_table(measured, hops.size)
    measured_hops = hops_of(cluster, RankGroup(nearest.ranks), transport)
    ratios = tuple((size, s / all_reduce_s(name, size, measured_hops)) for size, s in nearest.points)
    slowdown = MeasuredTable(nearest.collective, nearest.ranks, ratios)
    largest, _ = nearest.points[-1]
    return lambda size_bytes: closed_form(size_bytes) * slowdown.seconds(min(size_bytes, largest))


def _native_time(cluster: Cluster, group: RankGroup, transport: str, size_bytes: float) -> float:
    return native_s(cluster, size_bytes, group, transport)


def _hierarchical_by_memory_s(cluster: Cluster, group: RankGroup, size_bytes: float) -> float:
    """Seconds of a hierarchical all-reduce between CPU hosts (`shardwise.world.comm.levels`): reduce-scatter and all-gather through a
    host's memory,
    shards between hosts by the library's own rings; of large tensors one chunk crosses while the next is scattered."""
    route = group_path(cluster, group)
    host = replace(cluster, levels=cluster.levels[:1])
    inside_s = collective_s(host, "all_reduce", size_bytes, RankGroup(route.inside))
    peers = RankGroup(route.nodes, cluster.node_size, route.nodes * cluster.node_size)
    parts = max(1, ceil(size_bytes / PART_BYTES))
    across_s = parts * collective_s(cluster, "all_reduce", size_bytes / parts / route.inside, peers)
    return max(inside_s, across_s) + min(inside_s, across_s) / parts


def choose_algorithms(cluster: Cluster, group: RankGroup, transport: str = "") -> AllReduceChoices:
    """Choose the fastest algorithm by bytes, for `all_reduce=auto`: the library's own unless a program is predicted to take 10 % less.

    On GPUs it is the library's own for all sizes: the overhead of a program's messages there has not been measured.

    >>> choose_algorithms(Cluster.parse("dgx-a100-80"), RankGroup(1)).algorithm_for(4096)
    'native'
    """
    if group.size < 2 or not cluster.kind.prices_programs:
        return AllReduceChoices()
    times = algorithm_times(cluster, group, transport)

    def best(size: float) -> str:
        seconds = {name: call(size) * (1 - MARGIN if name == NATIVE else 1.0) for name, call in times.items()}
        return min(seconds, key=seconds.__getitem__)

    grid = [MIN_BYTES]
    while grid[-1] < MAX_BYTES:
        grid.append(grid[-1] * 2)
    names = [best(size) for size in grid]
    rows = []
    for (low, name), (high, next_name) in pairwise(zip(grid, names, strict=True)):
        while name != next_name:
            # Bisect to the last size of `name`: if a third algorithm wins in between, it gets its own row.
            lower, upper = low, high
            while upper - lower > max(1, lower // 256):
                middle = (lower + upper) // 2
                lower, upper = (middle, upper) if best(middle) == name else (lower, middle)
            rows.append((lower, name))
            low, name = upper, best(upper)
    return AllReduceChoices(tuple(rows), names[-1])
