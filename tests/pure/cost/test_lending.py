"""Cores of ranks that wait: who computes beside whom, against spans of the clock and closed forms, and what lending them is priced at."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.lending import THREAD_WAKE_S
from shardwise.cost.step_time.timing import PricedLayout
from shardwise.errors import LayoutError
from shardwise.model.graph import Graph
from shardwise.plan.ir.lending import WORK_OF_OP, concurrent_ranks, threads_per_rank
from shardwise.plan.ir.program import Compute
from shardwise.plan.ir.timeline import COMPUTE_LANE
from shardwise.plan.layout import Layout
from shardwise.schedules import SCHEDULES, build
from shardwise.simulate.clock import simulate
from shardwise.solve.search import price, search, simulate_time
from tests.support.gpt_graph import gpt

CHUNKS = {"interleaved": 2, "zb-v": 2}  # stages of a rank


@given(st.sampled_from(sorted(set(SCHEDULES) - {"gems-mast"})), st.integers(2, 5), st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_beside_is_who_overlaps_by_the_clock(schedule: str, stages: int, half: int, data: st.DataObject) -> None:
    """The same as any two spans of the simulated timeline with those times that reach more than a twentieth into one another."""
    chunks = CHUNKS.get(schedule, 1)
    program = build(schedule, stages * chunks, 2 * half, chunks=chunks)
    work = data.draw(st.lists(st.integers(1, 9).map(float), min_size=stages * chunks, max_size=stages * chunks))
    timeline = simulate(program, lambda a: WORK_OF_OP[a.op] * work[a.stage], lambda *_: 0.0)
    spans = [[s for s in timeline.spans if s.rank == rank and s.lane == COMPUTE_LANE] for rank in range(program.num_ranks)]
    for rank, met in enumerate(concurrent_ranks(program, work)):
        steps = [step for step, action in enumerate(program.actions[rank]) if isinstance(action, Compute)]
        assert list(met) == steps
        for span, step in zip(spans[rank], steps, strict=True):
            edge = 0.05 * (span.end_s - span.start_s)
            start, end = span.start_s + edge, span.end_s - edge
            over = {r for r, others in enumerate(spans) if r != rank and any(o.start_s < end and o.end_s > start for o in others)}
            assert met[step] == over


def test_who_is_alone_in_two_stages() -> None:
    """The first forward and the last backward of the first rank, and in GPipe two of the second; of MP-Basic all."""
    for name, alone in (("gpipe", ["0F0", "1F3", "1B0", "0B3"]), ("1f1b", ["0F0", "1B0", "1F3", "0B3"])):
        program = build(name, 2, 4)
        rows = concurrent_ranks(program, (1.0, 1.0))
        found = {str(program.actions[rank][step]) for rank, row in enumerate(rows) for step, others in row.items() if not others}
        assert {alone[0], alone[3]} <= found <= set(alone), (name, found)
    program = build("sequential", 3, 4)
    assert all(not others for row in concurrent_ranks(program, (1.0, 2.0, 3.0)) for others in row.values())


def test_microbatches_of_another_size_take_as_much_longer() -> None:
    """Of two microbatches a larger first one is still in the first stage's second forward when the next stage is done with it."""
    program = build("gpipe", 2, 2)
    step = [str(action) for action in program.actions[0]].index("0F1")
    assert concurrent_ranks(program, (1.0, 1.0), {0: 1.0, 1: 1.0})[0][step] == frozenset({1})
    first = [str(action) for action in program.actions[1]].index("1F0")
    assert concurrent_ranks(program, (1.0, 1.0), {0: 9.0, 1: 1.0})[1][first] == frozenset({0})
    assert concurrent_ranks(program, (1.0, 1.0), {0: 1.0, 1: 9.0})[0][step] == frozenset({1})


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_threads_are_no_more_than_cores(busy: int, own: int, more: int, cores: int) -> None:
    """Ranks that compute at once never have more cores than there are, unless each has more by itself; none has fewer than its own."""
    positions = busy + more
    each = threads_per_rank(busy, own, positions, cores)
    assert each >= own
    assert each == own or busy * each <= min(cores, own * positions)


def test_the_key() -> None:
    """`lend` is a word of a layout, of no meaning without a pipeline, and not built for stages that are arranged differently."""
    assert str(Layout.parse("pipeline=2 microbatches=2 lend=on")) == "data=1 tensor=1 pipeline=2 microbatches=2 lend=on"
    assert Layout.parse("data=2 lend=on") == Layout.parse("data=2")
    with pytest.raises(LayoutError, match="lend=maybe is unknown; use one of auto, off, on"):
        Layout.parse("pipeline=2 lend=maybe")
    with pytest.raises(LayoutError, match="lend=on with stages that are arranged differently"):
        Layout.parse("pipeline=2 microbatches=2 inner=2x1/1x2 lend=on")


CORE = Device("core", "cpu", (("float32", 1e11),), 8e9, 2e10, 1.0, 2e-6)


def _host(cores: int) -> Cluster:
    return Cluster("host", CORE, (ClusterLevel("node", cores, NetworkLink(1e-9, 1e15)),))


def test_one_after_another_takes_what_one_rank_with_all_threads_does() -> None:
    """MP-Basic with lent cores is one rank with all of them, but for waking threads; without it every rank computes with its own."""
    graph, cluster = gpt(layers=8, hidden=1024, sequence=256, vocabulary=512, batch=8), _host(4)
    pricer = Pricer(graph, cluster, 8)
    one = simulate_time(pricer, price(pricer, Layout(microbatches=2, threads=4))).prediction
    alone = simulate_time(pricer, price(pricer, Layout(microbatches=2, threads=1))).prediction
    for p in (2, 4):
        lent, own = (
            simulate_time(pricer, price(pricer, Layout(pipeline=p, microbatches=2, schedule="sequential", threads=4 // p, lend=word)))
            for word in ("on", "off")
        )
        woken = 2 * 3 * THREAD_WAKE_S * sum(op.target.split(".")[1] not in ("view", "transpose", "reshape") for op in graph.operators)
        took, other = dict(lent.prediction.parts), dict(one.parts)
        assert took["compute"] + took["pipeline"] == pytest.approx(other["compute"] + woken, rel=0.01)
        if p == 4:
            assert own.prediction.step_time_s == pytest.approx(alone.step_time_s, rel=0.02)
    assert alone.step_time_s > 3 * one.step_time_s


def test_what_is_lent_only_where_it_pays() -> None:
    """Large stages of one host lend; small ones do not, nor do hosts of one core, several hosts, GPUs, or where it is off."""

    def chosen(graph: Graph, cluster: Cluster, word: str = "auto") -> PricedLayout:
        pricer = Pricer(graph, cluster, 8)
        return simulate_time(pricer, price(pricer, Layout(pipeline=2, microbatches=4, schedule="gpipe", lend=word)))

    large, small = gpt(layers=4, hidden=1024, sequence=256, batch=8), gpt(layers=4, hidden=32, sequence=8, batch=8)
    lent, own = chosen(large, _host(2)), chosen(large, _host(2), "off")
    assert (lent.layout.lend, own.layout.lend) == ("on", "off")
    assert lent.prediction.step_time_s < 0.9 * own.prediction.step_time_s
    assert sum(seconds for _, seconds in lent.prediction.parts) == pytest.approx(lent.prediction.step_time_s)
    assert chosen(small, _host(2)).layout.lend == "auto"
    assert chosen(small, _host(2), "on").prediction.step_time_s > chosen(small, _host(2)).prediction.step_time_s
    two = Cluster("hosts", CORE, (ClusterLevel("node", 1, NetworkLink(1e-9, 1e15)), ClusterLevel("cluster", 2, NetworkLink(1e-5, 1e10))))
    gpu = Cluster("gpus", replace(CORE, kind="gpu", peak_flops=(("float32", 1e13),)), (ClusterLevel("node", 2, NetworkLink(3e-6, 2e11)),))
    assert [chosen(large, one).layout.lend for one in (two, gpu)] == ["auto", "auto"]


def test_the_search_lends_and_says_so() -> None:
    """A pipeline that is asked for is chosen with cores lent, unless a constraint says no; no bound lies above it."""
    graph = gpt(layers=4, hidden=512, sequence=256, batch=8)
    lent, own = (search(graph, _host(2), 8, "gpt", f"pipeline=2 microbatches=4{more}") for more in ("", " lend=off"))
    assert lent.layout.lend == "on"
    assert own.layout.lend == "off"
    assert lent.prediction is not None
    assert own.prediction is not None
    assert lent.prediction.step_time_s < own.prediction.step_time_s
    assert lent.bound_gap is not None
    assert lent.bound_gap >= 0
    assert any(key == "lend" and "cores" in words for key, words in lent.reasons)
