"""What a schedule answers of itself, against closed forms by name, and against walks along its order for stages of random sizes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cost.devices.devices import Widths
from shardwise.cost.memory.memory import MARGIN, StageMemory, StageState, bytes_by_moment, memory_of
from shardwise.cost.stages.stage import combine_stage_memory
from shardwise.plan.ir.program import Compute, ComputeOp, chain_links
from shardwise.plan.ir.schedule_sizes import CHUNKED
from shardwise.plan.layout import Layout
from shardwise.plan.plan import MemoryBreakdown
from shardwise.run.step.transfers import receives_posted_before
from shardwise.schedules import NAMES, layout_computes_by_rank, program_of, schedule_of
from shardwise.simulate.memory import peak_saved_bytes
from tests.support.closed_forms import BOTH_WAYS, SPLIT, in_flight

SEVERAL = (*CHUNKED, "zb-v", "chimera", "gems-mast", "gems-master")


def fitting(name: str, p: int, half: int, chunks: int) -> Layout:
    m = 2 if name == "gems-mast" else 2 * half
    return Layout(pipeline=p, microbatches=m, schedule=name, chunks=chunks if name in CHUNKED else 1)


def as_file(layout: Layout) -> Layout:
    """The same order as a schedule of the user's own."""
    text = "\n".join(" ".join(map(str, row)) for row in layout_computes_by_rank(layout, chain_links(layout.num_stages)))
    return Layout(pipeline=layout.pipeline, microbatches=layout.microbatches).with_schedule("mine.txt", text)


@pytest.mark.parametrize("name", NAMES)
@given(st.integers(1, 9), st.integers(1, 24), st.integers(2, 4))
def test_answers_are_those_of_the_closed_forms(name: str, p: int, half: int, chunks: int) -> None:
    """By name, where few microbatches answer for all of them, and as a file, of which all do."""
    layout = fitting(name, p, half, chunks)
    ranks = {
        "zb-v": [(min(s, 2 * p - 1 - s),) for s in range(2 * p)],
        **{one: [(s % p,) for s in range(layout.num_stages)] for one in CHUNKED},
    }.get(name, [tuple(dict.fromkeys((s, p - 1 - s))) if name in BOTH_WAYS else (s,) for s in range(p)])
    for one in map(schedule_of, (layout, as_file(layout))):
        assert list(one.ranks_of) == ranks
        assert one.stages_of == tuple(tuple(s for s, holders in enumerate(ranks) if rank in holders) for rank in range(p))
        assert one.shares == tuple({s: 1 / len(ranks[s]) for s in mine} for mine in one.stages_of)
        assert one.splits_backward == (name in SPLIT)
        assert one.has_replicas == (name in BOTH_WAYS and p > 1)
        assert one.min_microbatches == 1 + one.has_replicas
        assert one.has_fill_drain_bubble == (
            name in ("sequential", "gpipe", "1f1b") or (p == 1 and name not in SPLIT and layout.num_stages == 1)
        )
        assert not one.manages_memory
        flying = [in_flight(name, p, holders[0], layout.microbatches, layout.chunks) for holders in ranks]
        assert [one.in_flight(s) for s in range(one.num_stages)] == flying


@given(st.sampled_from(SEVERAL), st.integers(1, 6), st.integers(1, 20), st.integers(2, 4), st.integers(0, 1 << 20))
def test_what_is_kept_is_what_its_order_keeps_whatever_each_stage_does(name: str, p: int, half: int, chunks: int, seed: int) -> None:
    layout = fitting(name, p, half, chunks)
    sizes = np.random.default_rng(seed).integers(0, 100, layout.num_stages).astype(float)
    most = peak_saved_bytes(layout_computes_by_rank(layout, chain_links(layout.num_stages)), sizes.tolist())
    for one in (layout, as_file(layout)):
        for rank in range(p):
            now = schedule_of(one)
            assert (now.live_microbatches(rank).in_flight @ sizes[list(now.stages_of[rank])]).max() == most[rank]


@given(st.sampled_from(SEVERAL), st.integers(1, 4), st.integers(1, 10), st.integers(2, 3), st.integers(0, 1 << 20))
def test_what_arrives_beside_a_backward_is_what_the_executor_has_posted(name: str, p: int, half: int, chunks: int, seed: int) -> None:
    """Of a program with its transfers: what was posted before a backward and is not received yet, and what the compute before it made."""
    layout = fitting(name, p, half, chunks)
    stages = layout.num_stages
    kept, beside, x, g = np.random.default_rng(seed).integers(0, 100, (4, stages)).astype(float)
    x[0] = g[-1] = 0  # nothing enters the first stage, nothing leaves the last
    if name in (*CHUNKED, "zb-v"):  # neighbours of one rank hand on what stays where it is
        for before, after in pairwise(range(stages)):
            if schedule_of(layout).ranks_of[before] == schedule_of(layout).ranks_of[after]:
                x[after] = g[before] = 0
    program, schedule = program_of(layout, chain_links(stages)), schedule_of(layout)
    for rank, actions in enumerate(program.actions):
        held, most, last, posted = np.zeros(stages), 0.0, None, {}
        for step, (action, posts) in enumerate(zip(actions, receives_posted_before(actions), strict=True)):
            posted |= {at: actions[at].value for at in posts}
            posted.pop(step, None)
            if not isinstance(action, Compute):
                continue
            if action.op in (ComputeOp.B, ComputeOp.I):
                arriving = sum(x[v.index[1]] if v.name == "x" else g[v.index[1]] for v in posted.values() if v.name in "xg")
                sent = x[last.stage] if last is not None and last.op in (ComputeOp.B, ComputeOp.I) else 0.0
                most = max(most, held @ kept + beside[action.stage] + arriving + sent)
            held[action.stage] += {ComputeOp.F: 1, ComputeOp.B: -1, ComputeOp.W: -1}.get(action.op, 0)
            if action.op is ComputeOp.F:
                most = max(most, held @ kept)
            last = action
        mine = list(schedule.stages_of[rank])
        now = schedule.live_microbatches(rank)
        found = (
            now.in_flight @ kept[mine]
            + now.backward @ beside[mine]
            + now.inputs_in_transfer @ x[mine]
            + now.gradients_in_transfer @ g[mine]
        )
        assert found.max() == most


def test_a_file_that_moves_what_it_keeps_to_the_host_keeps_no_more() -> None:
    texts = ("0F0 0F1 0B0 0B1", "0F0 0OFFLOAD0 0F1 0B1 0LOAD0 0B0")
    layouts = [Layout(microbatches=2).with_schedule("mine.txt", text) for text in texts]
    assert [schedule_of(layout).live_microbatches(0).in_flight.max() for layout in layouts] == [2, 1]


def test_gradients_exist_from_a_stages_first_backward_on() -> None:
    """Saved bytes and gradients of two stages, at the fullest moment: GPipe's first backward, where half of a gradient's bytes are missing;
    1F1B's second one, which finds as many microbatches in flight; ZB-H1's, whose first input gradients find no gradients of weights."""

    def peak(name: str, microbatches: int = 4) -> tuple[float, float]:
        memory = StageMemory(MemoryBreakdown(), 10.0, transient_bytes=1.0, first_bytes=-2.0, late_gradient_bytes=4.0)
        moments = bytes_by_moment([memory], schedule_of(Layout(pipeline=2, microbatches=microbatches, schedule=name)).live_microbatches(0))
        return float(moments.total.max()), float(moments.gradients[moments.total.argmax()])

    assert peak("gpipe") == (4 * 10 - 2 + 4, 4)
    assert peak("1f1b") == (2 * 10 + 1 + 4, 4)
    assert peak("gpipe", 1) == (10 - 2 + 4, 4)
    moments = schedule_of(Layout(pipeline=2, microbatches=4, schedule="zb-h1")).live_microbatches(0)
    assert {tuple(row) for row in np.concatenate((moments.in_flight, moments.weight_gradients), 1).tolist()} >= {(2, 0), (2, 2)}


@pytest.mark.parametrize(("name", "kept"), [("gems-mast", 5.0), ("chimera", 7.0)])
def test_states_of_all_stages_and_the_fullest_moment(name: str, kept: float) -> None:
    """Two microbatches, one of each stage: GEMS has one at a time, Chimera both at once."""
    layout = Layout(pipeline=2, microbatches=2, schedule=name)
    large, small = (StageMemory(MemoryBreakdown(1.0, 1.0, 2.0, size, 0.5, MARGIN * 4), size, transient_bytes=0.5) for size in (5.0, 2.0))
    assert combine_stage_memory([large, small], schedule_of(layout), 0) == replace(
        MemoryBreakdown(2.0, 2.0, 4.0, kept, 0.5), margin=pytest.approx(MARGIN * 8 + MARGIN * (kept + 0.5 - 8))
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_leaves_whole_what_two_ranks_of_the_pipeline_have_but_divides_its_state(zero: int) -> None:
    """Of bytes a parameter: weights 4, gradients 4, two moments 8, over two data replicas and two ranks that have the stage."""
    state = StageState(num_parameters=100.0, num_trainable=100.0, entering_bytes=0.0)
    layout = Layout(data=2, pipeline=2, microbatches=2, schedule="chimera", zero=zero)
    found = memory_of(state, layout, 0, Widths(4.0, 4.0, 0.0)).alone
    assert (found.parameters, found.gradients, found.optimizer) == (400.0, 400.0, 800.0 / (4 if zero else 1))
