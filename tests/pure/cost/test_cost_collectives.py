"""The closed forms of all-reduce programs against the programs themselves, run message by message; and which algorithm is chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, MeasuredTable, NetworkLink
from shardwise.collectives import ALGORITHMS, build
from shardwise.cost.network.collectives import (
    CLOSED_FORMS,
    MAX_BYTES,
    MIN_BYTES,
    GroupHops,
    Hop,
    algorithm_times,
    all_reduce_s,
    choose_algorithms,
    hops_of,
    native_s,
)
from shardwise.cost.network.network import RankGroup, collective_s
from shardwise.errors import UsageError
from shardwise.plan.ir.program import Program
from shardwise.simulate.messages import Wire, deliver_messages
from shardwise.simulate.wires import cluster_wires

HOPS = (
    Hop(10e-6, 4e-11, 2e-6),  # latency, little else
    Hop(10e-6, 1e-9, 2e-6, 5e-10),
    Hop(0.0, 1e-9, 0.0, 1e-9),  # bytes and additions alone
)
SIZES = (1.0, 1e3, 1e6)
# By how much a closed form may miss, (below, above), on links of one speed: see the module's docstring for why.
EXACT = (1e-9, 1e-9)
OFF = {"tree": (0.1, 1e-9), "recursive_doubling": (0.18, 0.21), "halving_doubling": (0.18, 1e-9), "double_tree": (0.05, 0.27)}


def run(program: Program, size: float, hop: Hop) -> float:
    """Seconds of the program's own messages."""
    pieces = {value for held in (*program.initial, *program.wants) for value in held}
    wire = Wire(hop.latency_s, hop.byte_s, (), hop.message_s)
    return deliver_messages(program, lambda _: size / len(pieces), lambda *_: wire, hop.add_byte_s).seconds


def test_every_algorithm_has_a_form() -> None:
    assert set(CLOSED_FORMS) == set(ALGORITHMS["all_reduce"])


@pytest.mark.parametrize("name", [name for name in CLOSED_FORMS if name != "hierarchical"])
def test_forms_equal_programs_on_links_of_one_speed(name: str) -> None:
    for n in range(2, 34):
        program = build("all_reduce", name, n)
        power = n & (n - 1) == 0
        below, above = EXACT if power and name != "double_tree" else OFF.get(name, EXACT)
        for hop in HOPS:
            for size in SIZES:
                want, got = run(program, size, hop), all_reduce_s(name, size, GroupHops(hop, hop, n))
                assert want * (1 - below) <= got <= want * (1 + above), (name, n, size, hop, got / want)


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (8, 4), (3, 5), (1, 4), (6, 1)])
def test_the_form_of_the_hierarchy(sizes: tuple[int, int]) -> None:
    program = build("all_reduce", "hierarchical", sizes)
    for hop in HOPS:
        for size in SIZES:
            assert all_reduce_s("hierarchical", size, GroupHops(hop, hop, *sizes)) == pytest.approx(run(program, size, hop))


@pytest.mark.parametrize("machines", ["2xdgx-a100-80", "4xdgx-a100-80", "4xp3.16xlarge"])
def test_forms_over_nodes(machines: str) -> None:
    """Ports that ranks share, links of two speeds: exact but for those that the docstring names, and steps that wait for a port."""
    cluster = Cluster.parse(machines)
    hops = hops_of(cluster, RankGroup(cluster.num_devices))
    off = {"naive": 0.21, "double_tree": 0.27, **({} if hops.queue == 1 else {"recursive_doubling": 0.2, "halving_doubling": 0.2})}
    off["hierarchical"] = 0.15 if hops.queue > 1 else 1e-6
    for name in CLOSED_FORMS:
        program = build("all_reduce", name, (hops.inside, hops.nodes) if name == "hierarchical" else hops.size)
        pieces = {value for held in (*program.initial, *program.wants) for value in held}
        for size in (1e3, 1e5, 1e7, 1e9):
            part = size / len(pieces)
            want = deliver_messages(program, lambda _, part=part: part, cluster_wires(cluster), hops.near.add_byte_s).seconds  # type: ignore[misc]
            assert all_reduce_s(name, size, hops) == pytest.approx(want, rel=off.get(name, 1e-6)), (name, size)


def test_a_broken_form_is_seen() -> None:
    """The comparison is worth something: a ring of one step less is off by more than any tolerance above for few ranks."""
    hop = HOPS[1]
    shorter = run(build("all_reduce", "ring", 4), 1e6, hop) * 5 / 6
    assert all_reduce_s("ring", 1e6, GroupHops(hop, hop, 4)) > shorter * 1.15


def test_sixteen_thousand_ranks() -> None:
    """A tree's latency grows with the logarithm, a ring's with the number; both move 2M(n-1)/n and 2M log n."""
    cluster = Cluster.parse("2048xdgx-a100-80")
    hops = hops_of(cluster, RankGroup(16384))
    assert all_reduce_s("tree", 1.0, hops) < 30 * (hops.far.latency_s + hops.far.message_s)
    assert all_reduce_s("ring", 1.0, hops) > 4095 * hops.far.latency_s
    assert all_reduce_s("hierarchical", 1e9, hops) < all_reduce_s("ring", 1e9, hops) < all_reduce_s("naive", 1e9, hops)
    with pytest.raises(UsageError, match="no closed form of rnig"):
        all_reduce_s("rnig", 1.0, hops)


def cpus(nodes: int, cores: int, **tables: tuple[tuple[float, float], ...]) -> Cluster:
    """Hosts of processors; `tables`: collective_ranks -> points."""
    device = Device("core", "cpu", (("float32", 1e11),), 4e9, 1e10)
    levels = [
        ClusterLevel("node", cores, NetworkLink(2e-6, 1e10)),
        *([ClusterLevel("cluster", nodes, NetworkLink(5e-5, 1e8))] if nodes > 1 else []),
    ]
    made = [
        MeasuredTable(name.rpartition("_")[0].replace("__", "."), int(name.rpartition("_")[2]), points) for name, points in tables.items()
    ]
    return Cluster("test", device, tuple(levels), tables=tuple(made))


LINE = ((1024.0, 20e-6), (1048576.0, 1e-3))


def test_measured_messages_win() -> None:
    """Two ranks in a ring exchange halves twice and add one: exactly what the tables say of that."""
    cluster = cpus(1, 4, send_2=LINE, exchange_2=((1024.0, 30e-6), (1048576.0, 2e-3)), add_2=((1024.0, 1e-6), (1048576.0, 1e-4)))
    half = 524288.0
    exchange, add = (cluster.table(name, 2) for name in ("exchange", "add"))
    assert exchange is not None
    assert add is not None
    times = algorithm_times(cluster, RankGroup(2))
    assert times["ring"](2 * half) == pytest.approx(2 * exchange.seconds(half) + add.seconds(half))
    assert times["recursive_doubling"](half) == pytest.approx(exchange.seconds(half) + add.seconds(half))
    assert "hierarchical" not in times
    more = algorithm_times(cluster, RankGroup(8))["ring"](8 * 1024.0)
    assert more == pytest.approx(14 * 2 * 30e-6 + 7 * 2 * 1e-6)  # eight ranks on four cores take turns


def test_what_a_program_costs_beyond_its_messages() -> None:
    """`call` once, `step` with every message."""
    tables = {"send_2": LINE, "exchange_2": LINE}
    plain = algorithm_times(cpus(1, 4, **tables), RankGroup(2))
    more = algorithm_times(cpus(1, 4, **tables, call_2=((4096.0, 40e-6),), step_2=((4096.0, 5e-6),)), RankGroup(2))
    for name, messages in (("ring", 2), ("recursive_doubling", 1), ("tree", 2), ("naive", 1)):
        assert more[name](65536.0) - plain[name](65536.0) == pytest.approx(40e-6 + 5e-6 * messages), name


def test_whole_programs_that_were_measured_win() -> None:
    """What was measured at its sizes; in between, beyond, and for other numbers of ranks as much longer than the messages alone."""
    tables = {"send_2": LINE, "exchange_2": LINE}
    points = ((1024.0, 100e-6), (262144.0, 900e-6))
    cluster = cpus(1, 4, **tables, program__ring_2=points)
    plain, measured = algorithm_times(cpus(1, 4, **tables), RankGroup(2)), algorithm_times(cluster, RankGroup(2))
    assert [measured["ring"](size) for size, _ in points] == pytest.approx([s for _, s in points])
    first, last = (s / plain["ring"](size) for size, s in points)
    assert measured["ring"](16384.0) / plain["ring"](16384.0) == pytest.approx((first * last) ** 0.5)  # half of the way in logarithms
    four, plain_four = algorithm_times(cluster, RankGroup(4)), algorithm_times(cpus(1, 4, **tables), RankGroup(4))
    for size, longer in ((64.0, first), (262144.0, last), (2097152.0, last), (1e8, last)):
        assert measured["ring"](size) / plain["ring"](size) == pytest.approx(longer)
        assert four["ring"](size) / plain_four["ring"](size) == pytest.approx(longer)
    assert measured["tree"](1024.0) == plain["tree"](1024.0)


def test_each_transport_has_its_tables() -> None:
    shared = {"send_2": LINE, "exchange_2": LINE, "all_reduce_2": LINE}
    slow = tuple((size, 10 * s) for size, s in LINE)
    cluster = cpus(1, 4, **shared, send__gloo_2=slow, exchange__gloo_2=slow, all_reduce__gloo_2=slow)
    for name in ("native", "tree"):
        fast, over_gloo = (algorithm_times(cluster, RankGroup(2), transport)[name](65536.0) for transport in ("", "gloo"))
        assert over_gloo > 8 * fast, name
    assert native_s(cluster, 1048576.0, RankGroup(2), "gloo") == pytest.approx(1e-2)


def test_the_choice_is_the_least_at_every_size() -> None:
    slow = tuple((size, 1e-3 + 3 * s) for size, s in LINE)
    for cluster, n in (
        (cpus(2, 2), 4), (cpus(1, 8), 6), (cpus(4, 8), 32), (cpus(1, 2, send_2=LINE, exchange_2=LINE, all_reduce_2=slow), 2),
    ):  # fmt: skip
        times = algorithm_times(cluster, RankGroup(n))
        choices = choose_algorithms(cluster, RankGroup(n))
        for size in (MIN_BYTES, 4096, 50_000, 1 << 20, 3 << 20, 100 << 20, MAX_BYTES):
            chosen = times[choices.algorithm_for(size)](size)
            assert chosen <= 1.04 * min(call(size) for call in times.values()), (cluster.name, size, choices)
        assert all(a[1] != b[1] for a, b in pairwise(choices.rows))


def test_hosts_far_apart_choose_the_hierarchy() -> None:
    """Shared memory inside, a slow network between: the host's ranks must not send the same bytes over it more than once."""
    cluster = cpus(2, 2, all_reduce_2=LINE)
    assert choose_algorithms(cluster, RankGroup(4)).algorithm_for(64 << 20) == "hierarchical"
    times = algorithm_times(cluster, RankGroup(4))
    size = 64e6
    inside = collective_s(replace(cluster, levels=cluster.levels[:1]), "all_reduce", size, RankGroup(2))
    assert times["hierarchical"](size) == pytest.approx(inside + size / 1e8, rel=0.1)
    assert times["ring"](size) == pytest.approx(1.5 * size / 1e8, rel=0.1)


def test_where_there_is_nothing_to_choose() -> None:
    """One rank; and GPUs, where messages of programs were not measured."""
    assert choose_algorithms(cpus(1, 2), RankGroup(1)).names == ("native",)
    assert choose_algorithms(Cluster.parse("8xdgx-a100-80"), RankGroup(64)).names == ("native",)


def test_a_library_that_is_slow_is_not_chosen() -> None:
    slow = tuple((size, 1e-3 + 3 * s) for size, s in LINE)
    cluster = cpus(1, 2, send_2=LINE, exchange_2=LINE, all_reduce_2=slow)
    assert "native" not in choose_algorithms(cluster, RankGroup(2)).names
    assert choose_algorithms(cpus(1, 2, send_2=slow, exchange_2=slow, all_reduce_2=LINE), RankGroup(2)).names == ("native",)
