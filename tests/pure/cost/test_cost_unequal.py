"""What microbatches of unequal size cost, against those of batches that divide, by hand and by the clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import computes_by_rank, price, simulate_time, simulate_timeline
from shardwise.plan.ir.program import ComputeOp
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import microbatch_sizes, partial_batch_sizes
from shardwise.solve.bounds import layout_lower_bound_s
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

GPU = Device("gpu", "gpu", (("float32", 1e12), ("bfloat16", 4e12)), 1e11, 1e12, 1.0, 5e-6)
GPUS = Cluster("gpus", GPU, (ClusterLevel("node", 4, NetworkLink(3e-6, 2e11)), ClusterLevel("cluster", 2, NetworkLink(1e-5, 1e10))))


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9))
def test_sizes_are_as_equal_as_replicas_allow(each: int, data: int, microbatches: int) -> None:
    if each < microbatches:
        return
    sizes = microbatch_sizes(each * data, data, microbatches)
    assert (sum(sizes), len(sizes)) == (each * data, microbatches)
    assert all(size % data == 0 for size in sizes)
    assert sizes[0] - sizes[-1] in (0, data)
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 6), st.data())
def test_a_smaller_batch_has_no_larger_microbatches(each: int, data: int, microbatches: int, draw: st.DataObject) -> None:
    if each < microbatches:
        return
    layout = Layout(data=data, microbatches=microbatches)
    whole = microbatch_sizes(each * data, data, microbatches)
    part = partial_batch_sizes(draw.draw(st.integers(1, each)) * data, layout, each * data, 1)
    assert max(part) <= whole[0]
    assert len(part) <= microbatches
    assert partial_batch_sizes(each * data, layout, each * data, 1) == whole


def test_one_stage_costs_the_sum_of_its_microbatches() -> None:
    """Batch 10 in 4 is 3, 3, 2, 2: half of what batch 12 and half of what batch 8 compute in 4."""
    graph = gpt(2)
    layout = Layout(microbatches=4, schedule="gpipe")
    parts = {b: dict(price(Pricer(graph, GPUS, b), layout).prediction.parts) for b in (8, 10, 12)}
    for part in ("compute", "tensor"):
        assert parts[10][part] == pytest.approx((parts[8][part] + parts[12][part]) / 2)
    memory = {b: price(Pricer(graph, GPUS, b), layout).prediction.memory for b in (10, 12)}
    assert memory[10] == memory[12], "the larger microbatches are what a device must hold"


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1", "chimera", "gems-master", "interleaved"]), st.integers(9, 31), st.sampled_from([1, 2]))
def test_the_clock_times_each_microbatch_by_its_size(schedule: str, batch: int, data: int) -> None:
    """What the search's clock says is the timeline's end, whose computes take what those of batches that divide take."""
    graph, layout = gpt(4), Layout(data=data, pipeline=2, microbatches=4, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    batch -= batch % data
    pricer = Pricer(graph, GPUS, batch)
    priced = price(pricer, layout)
    line = simulate_timeline(pricer, priced)
    timed = dict(simulate_time(pricer, priced).prediction.parts)
    assert timed["compute"] + timed["tensor"] + timed["pipeline"] >= line.total_s * (1 - 1e-9)
    alike = {size: Pricer(graph, GPUS, 4 * size).stages(layout, priced.sites) for size in set(microbatch_sizes(batch, data, 4))}
    sizes = microbatch_sizes(batch, data, 4)
    computes = {span.name: span.end_s - span.start_s for span in line.spans if span.name[1:2] == "F"}
    want = {f"{a.stage}F{a.microbatch}": alike[sizes[a.microbatch]][a.stage].forward_s
            for row in computes_by_rank(layout, ((0, 1),) if layout.num_stages == 2 else ((0, 1), (1, 2), (2, 3)))
            for a in row if a.op is ComputeOp.F}  # fmt: skip
    assert computes == pytest.approx(want)
    assert layout_lower_bound_s(pricer, layout, schedule not in ("gpipe", "1f1b")) <= simulate_time(
        pricer, priced
    ).prediction.step_time_s * (1 + 1e-9)


def test_unequal_microbatches_are_planned_where_they_are_asked_for() -> None:
    by_hand = search(gpt(2), GPUS, 10, "gpt", layout=Layout(pipeline=2, microbatches=4))
    assert by_hand.microbatch_sizes == (3, 3, 2, 2)
    asked = search(gpt(2), GPUS, 10, "gpt", "microbatches=4 data=1")
    assert asked.layout.microbatches == 4
    assert search(gpt(2), GPUS, 10, "gpt", "data=1").layout.microbatches in (1, 2, 5, 10)
