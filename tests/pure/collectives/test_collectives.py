"""Collective algorithms: proven, and their bytes and steps held against the closed forms of the literature, counted on the program."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.collectives import ALGORITHMS, NESTED, build, butterfly, tree
from shardwise.errors import ProgramError, UsageError
from shardwise.plan.ir.action import Recv, Send
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Program, Value
from shardwise.plan.layout import Layout
from shardwise.simulate.messages import Traffic, Wire, deliver_messages, num_steps

POWERS_ONLY = ("halving", "doubling")
EVERY = [(collective, name) for collective, known in ALGORITHMS.items() for name in known]


def programs(name: str, num_ranks: int) -> list[int | tuple[int, ...]]:
    """Sizes of about `num_ranks` ranks that an algorithm takes."""
    if name in POWERS_ONLY and num_ranks & (num_ranks - 1):
        return []
    if name not in NESTED:
        return [num_ranks]
    boxes = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return [(d, num_ranks // d) for d in boxes]


def traffic(program: Program, latency_s: float = 0.0) -> Traffic:
    """Of a tensor of one byte, however it is cut."""
    pieces = {value for held in program.wants for value in held}
    return deliver_messages(program, lambda _: 1 / len(pieces), lambda *_: Wire(latency_s, 1.0))


@pytest.mark.parametrize(("collective", "name"), EVERY)
def test_every_algorithm_is_proven_for_1_to_33_ranks(collective: str, name: str) -> None:
    for num_ranks in range(1, 34):
        for sizes in programs(name, num_ranks):
            check(build(collective, name, sizes))


def test_a_butterfly_is_recursive_doubling_which_moves_n_m_log_n_bytes() -> None:
    program = build("all_reduce", "butterfly", 8)
    assert traffic(program).total_bytes == pytest.approx(8 * log2(8))
    assert str(Layout.parse("data=8 all_reduce=butterfly")) == str(Layout.parse("data=8 all_reduce=recursive_doubling"))
    assert traffic(build("all_reduce", "halving_doubling", 8)).total_bytes != pytest.approx(8 * log2(8))
    with pytest.raises(UsageError, match="no algorithm butterfly"):
        build("all_gather", "butterfly", 8)


@pytest.mark.parametrize("n", range(1, 34))
def test_bytes_and_steps_of_all_reduce(n: int) -> None:
    core = butterfly.largest_power_of_two(n)
    folded = n - core
    for name, total, most, steps in (
        ("naive", n * (n - 1), n - 1, n - 1),
        ("parameter_server", 2 * (n - 1), n - 1, 2 * (n - 1)),
        ("ring", 2 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1)),
        ("tree", 2 * (n - 1), None, 2 * ceil(log2(n))),
        ("recursive_doubling", core * log2(core) + 2 * folded, None, None if folded else log2(core)),
        ("halving_doubling", 2 * (core - 1) + 2 * folded, None, None if folded else 2 * log2(core)),
    ):
        program = build("all_reduce", name, n)
        found = traffic(program)
        assert found.total_bytes == pytest.approx(total), name
        if most is not None:
            assert max(found.sent_bytes) == pytest.approx(most), name
        if steps is not None:
            assert num_steps(program) == steps, name
    if folded:  # a message in and one out, and those that were sent early stand before others
        assert log2(core) + 2 <= num_steps(build("all_reduce", "recursive_doubling", n)) <= log2(core) + 4
        assert 2 * log2(core) + 2 <= num_steps(build("all_reduce", "halving_doubling", n)) <= 2 * log2(core) + 4


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
def test_bytes_and_steps_of_the_others(n: int) -> None:
    for collective, name, total, steps in (
        ("reduce_scatter", "ring", n - 1, n - 1),
        ("reduce_scatter", "naive", n - 1, n - 1),
        ("all_gather", "ring", n - 1, n - 1),
        ("all_gather", "naive", n - 1, n - 1),
        ("broadcast", "naive", n - 1, n - 1),
        ("broadcast", "tree", n - 1, ceil(log2(n))),
        ("all_to_all", "direct", (n - 1) / n, n - 1),
    ):
        program = build(collective, name, n)
        assert traffic(program).total_bytes * (n if collective == "all_to_all" else 1) == pytest.approx(
            total * (n if collective == "all_to_all" else 1)
        ), (collective, name)
        assert num_steps(program) == steps, (collective, name)
    assert num_steps(build("broadcast", "ring", n, pieces=8)) == (n - 2 + 8 if n > 2 else 1)


@given(st.integers(2, 6), st.integers(2, 6))
def test_a_hierarchy_sends_little_between_boxes(width: int, boxes: int) -> None:
    """2M(b-1)/(k·b) a rank, as Mikami et al. 2018 have it; a flat ring sends 2M(n-1)/n over every border of two boxes."""
    n = width * boxes
    program = build("all_reduce", "hierarchical", (width, boxes))
    far = [0.0] * n
    for message in traffic(program).messages:
        if message.source // width != message.target // width:
            far[message.source] += len(message.values) / n
    assert far == [pytest.approx(2 * (boxes - 1) / (width * boxes))] * n


@given(st.integers(2, 6), st.integers(2, 6))
def test_two_levels_of_all_to_all_send_fewer_messages(width: int, boxes: int) -> None:
    n = width * boxes
    direct, nested = build("all_to_all", "direct", n), build("all_to_all", "two_level", (width, boxes))
    assert len(traffic(direct).messages) == n * (n - 1)
    assert len(traffic(nested).messages) == n * (width + boxes - 2)


@pytest.mark.parametrize("n", range(2, 40))
def test_no_rank_is_inside_both_trees(n: int) -> None:
    first, second = tree.binary_tree(n), tree.binary_tree(n, 1)
    assert not {r for r in range(n) if first.children[r]} & {r for r in range(n) if second.children[r]} or n == 2
    assert max(map(len, first.children)) <= 2
    assert max(first.depth()) <= 2 * log2(n)


def test_a_double_tree_in_many_pieces_comes_near_its_bandwidth() -> None:
    """A tree in one piece takes 2·log2 n times M; pipelined in both directions it no longer grows with n."""
    whole = traffic(build("all_reduce", "tree", 32)).seconds
    pieces = [traffic(build("all_reduce", "double_tree", n, pieces=64)).seconds for n in (8, 32)]
    assert whole == pytest.approx(10)
    assert pieces[1] < 3.5
    assert pieces[1] == pytest.approx(pieces[0], rel=0.1)


def test_latency_decides_for_small_messages_and_bandwidth_for_large_ones() -> None:
    """The crossing that all libraries choose by (Thakur et al. 2005)."""

    def best(latency_s: float) -> str:
        names = ("ring", "recursive_doubling", "halving_doubling")
        return min(names, key=lambda name: traffic(build("all_reduce", name, 16), latency_s).seconds)

    assert best(10.0) == "recursive_doubling"
    assert best(0.01) == "halving_doubling"


def broken(program: Program, rank: int, step: int, *actions: Send | Recv) -> Program:
    """The program with action `step` of `rank` replaced."""
    rows = [list(row) for row in program.actions]
    rows[rank][step : step + 1] = list(actions)
    return replace(program, actions=tuple(map(tuple, rows)))


def test_a_double_add_a_lost_piece_and_a_deadlock_are_found() -> None:
    ring = build("all_reduce", "ring", 4)
    receive = next(i for i, a in enumerate(ring.actions[1]) if isinstance(a, Recv) and not a.add)
    action = ring.actions[1][receive]
    assert isinstance(action, Recv)
    with pytest.raises(ProgramError, match="has contribution"):
        check(broken(ring, 1, receive, Recv(action.value, action.source, add=True)))
    forgotten = next(i for i, a in enumerate(ring.actions[2]) if isinstance(a, Recv) and a.add)
    wrong = ring.actions[2][forgotten]
    assert isinstance(wrong, Recv)
    with pytest.raises(ProgramError, match="lacks contribution"):
        check(broken(ring, 2, forgotten, Recv(wrong.value, wrong.source)))
    with pytest.raises(ProgramError, match="no rank can move"):
        check(broken(ring, 3, 0))
    with pytest.raises(ProgramError, match="never comes"):
        traffic(broken(ring, 3, 0))


def test_messages_share_ports() -> None:
    """Two senders into one receiver take turns; over two receivers they do not, unless they share a port."""
    a, b = Value("a", ()), Value("b", ())
    into_one = Program("in", 0, ({a: {0: 1}}, {b: {1: 1}}, {}), ((Send(a, 2),), (Send(b, 2),), (Recv(a, 0), Recv(b, 1))), ({}, {}, {}))
    assert deliver_messages(into_one, lambda _: 1.0, lambda *_: Wire(0.5, 1.0)).seconds == 2.5
    apart = Program(
        "out", 0, ({a: {0: 1}}, {b: {1: 1}}, {}, {}), ((Send(a, 2),), (Send(b, 3),), (Recv(a, 0),), (Recv(b, 1),)), ({}, {}, {}, {})
    )
    assert deliver_messages(apart, lambda _: 1.0, lambda *_: Wire(0.5, 1.0)).seconds == 1.5
    assert deliver_messages(apart, lambda _: 1.0, lambda *_: Wire(0.5, 1.0, ("port",))).seconds == 2.5


def test_what_cannot_be_built_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"no algorithm rign \(did you mean ring\?\)"):
        build("all_reduce", "rign", 4)
    with pytest.raises(UsageError, match="unknown collective all_reduse"):
        build("all_reduse", "ring", 4)
    with pytest.raises(UsageError, match="needs a power of two, so use ring"):
        build("reduce_scatter", "halving", 6)
    with pytest.raises(UsageError, match="5 servers among 4 ranks"):
        build("all_reduce", "parameter_server", 4, servers=5)
    with pytest.raises(UsageError, match="ring takes no servers"):
        build("all_reduce", "ring", 4, servers=5)
    with pytest.raises(UsageError, match="at least 1"):
        build("all_reduce", "ring", 0)
