"""Layers of several stages on one rank: against every choice, priced; bounds that no choice beats; plans that repeat as few as fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.step import Pricer, combine_stage_memory
from shardwise.cost.step_time.timing import balanced_sites, pipeline_lower_bound_s, price, simulate_time, stage_trips_lower_bound_s
from shardwise.errors import Infeasible
from shardwise.plan.layout import Layout
from shardwise.schedules import schedule_of
from shardwise.solve.activation_memory.choose import added_time_lower_bound_s, choose_activation_memory, with_layer_choices
from shardwise.solve.activation_memory.residency import ALL_CHOICES, KEEP, OFFLOAD, RECOMPUTE
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt


def cluster(memory_bytes: float, devices: int = 2, flops: float = 4e11) -> Cluster:
    device = Device("gpu", "gpu", (("float32", flops), ("bfloat16", 4 * flops)), memory_bytes, 1e12, 1.0, 5e-6)
    return Cluster("gpus", device, (ClusterLevel("node", devices, NetworkLink(3e-6, 2e11)),))


def between(layout: Layout, tight: float) -> tuple[Pricer, tuple[str, ...]]:
    """A pricer for devices with less memory than the layout needs, and more than it needs when all layers are repeated."""
    wide = Pricer(gpt(6), cluster(1e11), 8)
    sites = balanced_sites(wide, layout)
    most, least = (price(wide, replace(layout, recompute=word), sites).prediction.memory.total for word in ("none", "full"))
    return Pricer(gpt(6), cluster(least + tight * (most - least)), 8), sites


def ways(pricer: Pricer, layout: Layout, sites: tuple[str, ...], rank: int, allowed: tuple[str, ...]) -> dict[Layout, float]:
    """Seconds of a rank for one microbatch, by choice for its layers (the first moved, the next repeated) under which it fits."""
    mine = schedule_of(layout).stages_of[rank]
    names = [[one.name for one in pricer.layer_costs(layout, sites, s)] for s in range(layout.num_stages)]
    most = (99 if OFFLOAD in allowed else 0), (99 if RECOMPUTE in allowed else 0)
    pairs_of = [[(k, d) for k in range(n + 1) for d in range(n + 1 - k) if k <= most[0] and d <= most[1]] for n in map(len, names)]
    counts = [pairs_of[s] for s in mine]
    found = {}
    for pairs in product(*counts):
        every: list[tuple[list[str], tuple[str, ...]]] = [([], ())] * layout.num_stages
        for s, (k, d) in zip(mine, pairs, strict=True):
            every[s] = names[s], (OFFLOAD,) * k + (RECOMPUTE,) * d + (KEEP,) * (len(names[s]) - k - d)
        one = with_layer_choices(layout, every)
        costs = pricer.stages(one, sites, only=mine)
        if held_bytes(pricer, one, sites, rank) <= pricer.cluster.device.memory_bytes:
            found[one] = sum(cost.forward_s + cost.backward_s for cost in costs)
    return found


def held_bytes(pricer: Pricer, layout: Layout, sites: tuple[str, ...], rank: int) -> float:
    return combine_stage_memory(pricer.stage_memories(layout, sites, schedule_of(layout).stages_of[rank]), schedule_of(layout), rank).total


@settings(max_examples=20, deadline=None)
@given(
    st.floats(0.02, 0.98), st.integers(2, 8), st.sampled_from([(KEEP, RECOMPUTE), ALL_CHOICES]), st.sampled_from(["interleaved", "zb-v"])
)
def test_a_rank_of_several_stages_has_its_best(tight: float, microbatches: int, allowed: tuple[str, ...], schedule: str) -> None:
    """Two ranks of two stages: no choice that the prices let fit is faster than the planner's, and none than its bound."""
    layout = Layout(pipeline=2, microbatches=microbatches, schedule=schedule, chunks=2)
    pricer, sites = between(layout, tight)
    found = choose_activation_memory(pricer, layout, sites, allowed)
    for rank in range(2):
        every = ways(pricer, layout, sites, rank, allowed)
        more = added_time_lower_bound_s(pricer, layout, sites, rank, allowed)
        own = sum(cost.forward_s + cost.backward_s for cost in pricer.stages(layout, sites, only=schedule_of(layout).stages_of[rank]))
        assert min(every.values(), default=inf) >= (own + more) * (1 - 1e-9)
        if found is None:
            continue
        mine = sum(cost.forward_s + cost.backward_s for cost in pricer.stages(found, sites, only=schedule_of(layout).stages_of[rank]))
        assert held_bytes(pricer, found, sites, rank) <= pricer.cluster.device.memory_bytes
        assert mine <= min(every.values()) * (1 + 1e-6)
    if schedule == "interleaved":  # repeating everything fits, so something does; all repeated is no choice by layer
        assert (
            found is not None
            or min(len(ways(pricer, layout, sites, rank, (KEEP, RECOMPUTE))) for rank in range(2)) <= 1
            or OFFLOAD in allowed
        )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(2, 3), st.integers(2, 3))
def test_no_clock_is_below_the_bound_of_an_interleaved_pipeline(microbatches: int, pipeline: int, chunks: int) -> None:
    """With few microbatches each waits between the stages of a rank: the bound is then the clock's own time, for equal stages."""
    layout = Layout(pipeline=pipeline, microbatches=microbatches, schedule="interleaved", chunks=chunks)
    pricer = Pricer(gpt(9), cluster(1e11, pipeline), microbatches)
    priced = simulate_time(pricer, price(pricer, layout, balanced_sites(pricer, layout)))
    passed = sum(seconds for name, seconds in priced.prediction.parts if name in ("compute", "tensor", "pipeline"))
    trips = [(cost.forward_s, cost.forward_s + cost.backward_s) for cost in priced.costs]
    assert pipeline_lower_bound_s(layout, trips) <= passed * (1 + 1e-9)
    equal = [(1.0, 3.0)] * layout.num_stages
    stages = layout.num_stages
    want = (stages + microbatches - 1) * 3.0 if microbatches <= pipeline else (microbatches * chunks + pipeline - 1) * 3.0
    assert pipeline_lower_bound_s(layout, equal) == pytest.approx(want)
    assert pipeline_lower_bound_s(layout, stage_trips_lower_bound_s(pricer, layout, with_recompute=False)) <= passed * (1 + 1e-9)


def test_the_planner_repeats_some_layers_of_an_interleaved_pipeline() -> None:
    """Where repeating all layers leaves memory unused, as many are repeated as it takes, faster, within the memory."""
    asked = "data=1 tensor=1 pipeline=2 schedule=interleaved chunks=2 microbatches=8 zero=0 offload=none precision=float32"
    pricer, _ = between(Layout(pipeline=2, microbatches=8, schedule="interleaved", chunks=2), 0.4)  # cheap operators alone do not fit
    have = pricer.cluster.device.memory_bytes
    plan = search(gpt(6), cluster(have), 8, "gpt", asked)
    full = search(gpt(6), cluster(have), 8, "gpt", f"{asked} recompute=full")
    assert plan.prediction is not None
    assert full.prediction is not None
    assert plan.layout.residency.recompute.is_partial
    assert plan.prediction.memory.total <= have
    assert plan.prediction.step_time_s < full.prediction.step_time_s
    assert plan.bound_gap is not None
    assert plan.bound_gap >= 0
    with pytest.raises(Infeasible):
        search(gpt(6), cluster(have), 8, "gpt", f"{asked} recompute=none")
