"""Steps of replicas whose updates may come late, simulated: closed forms, and what every timeline must hold."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict

import pytest

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.collectives.parameter_server import all_reduce
from shardwise.cost.memory.memory import server_weight_copies
from shardwise.cost.network.collectives import GroupHops, Hop, push_pull_s
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import price
from shardwise.errors import LayoutError, UsageError
from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.layout import Layout
from shardwise.simulate.messages import Wire, deliver_messages
from shardwise.simulate.stragglers import ServerExchange, simulate_steps
from shardwise.solve.search import search
from shardwise.solve.stragglers import straggler_steps
from tests.support.gpt_graph import gpt

CPU = Device("c", "cpu", (("float32", 1e11), ("bfloat16", 1e11), ("float64", 5e10)), 64e9, 20e9)
GRAPH = gpt(3, hidden=64, batch=8)


def _steady(timeline: Timeline, rank: int = 0) -> float:
    """Seconds of a step in the second half."""
    starts = [span.start_s for span in timeline.spans if span.rank == rank and span.lane == "compute"]
    half = len(starts) // 2
    return (starts[-1] - starts[half]) / (len(starts) - 1 - half)


@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_equal_ranks_take_what_the_closed_form_says(ranks: int, staleness: int) -> None:
    """Who gets weights first pushes first: a step and its way to the server and back is c + u + (n - 1) p + q where pushes take longer than
    pulls, and the reverse; K + 1 of them are under way. The port and the compute bind besides."""
    for compute, push, pull, update in ((1.0, 0.25, 0.125, 0.5), (0.25, 0.5, 0.5, 0.125)):
        exchange = ServerExchange(staleness, push, pull, update, servers=(0,))
        found = _steady(simulate_steps([[compute] * 120] * ranks, exchange), ranks - 1)
        cycle = compute + update + (ranks - 1) * max(push, pull) + min(push, pull)
        assert found == pytest.approx(max(compute, update, (ranks - 1) * push, (ranks - 1) * pull, cycle / (staleness + 1)), rel=0.03)


def test_servers_share_what_passes_one_port() -> None:
    one, two = (_steady(simulate_steps([[0.0] * 40] * 4, ServerExchange(0, part, part, 0.0, ranks)))
                for part, ranks in ((1.0, (0,)), (0.5, (0, 2))))  # fmt: skip
    assert one == 4.0  # three pushes, and one pull
    assert 2.0 <= two <= 2.4


def test_ranks_that_are_slow_by_turns_wait_for_each_other_at_once_only() -> None:
    rows = [[3.0 if (step + rank) % 2 else 1.0 for step in range(60)] for rank in range(2)]
    assert _steady(simulate_steps(rows, ServerExchange(0, 0.0))) == 3.0
    assert _steady(simulate_steps(rows, ServerExchange(1, 0.0))) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("servers", [(), (0,), (1, 3)])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_nobody_is_further_ahead_than_the_bound(staleness: int, servers: tuple[int, ...]) -> None:
    """A rank begins step t when everyone has ended step t - 1 - K, and ports carry one message at a time."""
    draw = random.Random(staleness)
    rows = [[draw.expovariate(1.0) for _ in range(50)] for _ in range(4)]
    timeline = simulate_steps(rows, ServerExchange(staleness, 0.05, 0.05, 0.02, servers))
    ended, lanes = defaultdict(dict), defaultdict(list)
    for span in timeline.spans:
        lanes[span.rank, span.lane].append((span.start_s, span.end_s))
        if span.lane == "compute":
            ended[span.rank][int(span.name.split()[1])] = span
    for row in ended.values():
        assert len(row) == 50
        for step, span in row.items():
            if step > staleness:
                assert span.start_s >= max(other[step - 1 - staleness].end_s for other in ended.values())
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))


def test_more_staleness_is_never_slower_here() -> None:
    draw = random.Random(7)
    rows = [[1 + draw.expovariate(1.0) for _ in range(60)] for _ in range(4)]
    totals = [simulate_steps(rows, ServerExchange(k, 0.1, 0.1, 0.05, (0,))).total_s for k in (0, 1, 2, 8)]
    assert totals == sorted(totals, reverse=True)
    assert totals[-1] >= max(map(sum, rows))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="2 ranks of"):
        simulate_steps([[1.0], [1.0, 1.0]], ServerExchange(0, 1.0))
    with pytest.raises(UsageError, match="servers"):
        simulate_steps([[1.0], [1.0]], ServerExchange(0, 1.0, servers=(2,)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("servers=1", "servers=1 of data=1: .* use data=2 or more"),
        ("data=2 servers=3", "use data=3 or more"),
        ("data=2 servers=1 zero=1", "zero=1 with servers=1 is not supported; use zero=0, or servers=0"),
        ("data=2 context=2 servers=1", "context=2 with servers=1"),
        ("data=2 servers=1 all_reduce=ring", "all_reduce=ring with servers=1 is not supported; use all_reduce=auto"),
        ("data=2 servers=1 compress=int8", "compress=int8"),
    ],
)
def test_what_does_not_go_together_is_refused(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(text)


def test_a_layout_is_read_and_written_back() -> None:
    layout = Layout.parse("data=4 servers=2 staleness=1")
    assert Layout.parse(str(layout)) == layout
    assert layout.server_ranks == (0, 2)


def _hosts(num: int, bandwidth: float = 1e8) -> Cluster:
    link = NetworkLink(0.0, bandwidth, protocol="gloo")
    return Cluster("hosts", CPU, (ClusterLevel("node", 1, NetworkLink(0.0, 1e10)), ClusterLevel("network", num, link)))


def test_a_servers_port_binds() -> None:
    """2 M (n - 1)/s over its bandwidth, between hosts of one rank each."""
    pricer = Pricer(GRAPH, _hosts(4), 8)
    size = 4.0 * GRAPH.num_trainable
    found = {}
    for servers in (1, 2, 4):
        parts = dict(price(pricer, Layout.parse(f"data=4 servers={servers} staleness=1")).prediction.parts)
        found[servers] = parts["gradients"]
        step = parts["compute"] + parts["optimizer"]
        want = 2 * size * 3 / servers / 1e8 - pricer.devices.overlap(Layout(data=4)) * step
        assert parts["gradients"] == pytest.approx(want, rel=0.03)
    assert found[1] > found[2] > found[4]


@pytest.mark.parametrize(("ranks", "servers"), [(4, 1), (4, 2), (5, 5)])
def test_the_price_is_what_messages_over_ports_take(ranks: int, servers: int) -> None:
    """Seconds of pushing and pulling against the program of that exchange, message by message."""
    hop = Hop(0.0, 1.0)
    timed = deliver_messages(all_reduce(ranks, servers), lambda value: 60.0 / servers, lambda source, target: Wire(0.0, 1.0)).seconds
    assert sum(push_pull_s(60.0, GroupHops(hop, hop, ranks), servers)) == pytest.approx(timed)


def test_memory_of_servers() -> None:
    assert server_weight_copies(Layout.parse("data=4 servers=4 staleness=3")) == 2.25
    pricer = Pricer(GRAPH, _hosts(4), 8)
    alone, served = (price(pricer, Layout.parse(text)).prediction.memory for text in ("data=4", "data=4 servers=2"))
    assert served.optimizer == alone.optimizer / 2
    assert served.parameters == pytest.approx(1.5 * alone.parameters)


def test_a_constraint_asks_for_servers_and_no_search_takes_them() -> None:
    assert search(GRAPH, _hosts(4), 8, "gpt", "data=4").layout.servers == 0
    assert search(GRAPH, _hosts(4), 8, "gpt", "servers=2").layout.servers == 2


def test_many_steps_of_a_plan_say_what_lateness_costs() -> None:
    pricer = Pricer(GRAPH, _hosts(4, 1e10), 8)
    at_once, late = (straggler_steps(pricer, price(pricer, Layout.parse(f"data=4 servers=1 staleness={k}")), 40, 1.0) for k in (0, 2))
    assert at_once.total_s > 1.3 * late.total_s
    even = straggler_steps(pricer, price(pricer, Layout.parse("data=4 servers=1")), 40, 0.0)
    assert even.total_s < late.total_s
    with pytest.raises(UsageError, match="of tensor and pipeline ranks"):
        straggler_steps(pricer, price(pricer, Layout.parse("data=2 context=2")), 40, 1.0)
    together = straggler_steps(pricer, price(pricer, Layout.parse("data=2 tensor=2 servers=1 staleness=1")), 40, 1.0)
    assert together.num_ranks == 2  # a replica is late as one
    for steps, part in ((1, 0.5), (40, -1.0), (40, float("inf")), (40, float("nan"))):
        with pytest.raises(UsageError, match=f"{steps} steps, late by {part:g}; it takes"):
            straggler_steps(pricer, price(pricer, Layout.parse("data=4")), steps, part)
