"""Layers that are repeated or moved: what the words mean, what they cost beside enumeration, and the fewest that fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import balanced_sites, price, simulate_time
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.residency import LayerChoice, Residency
from shardwise.solve.activation_memory.choose import choose_activation_memory
from shardwise.solve.activation_memory.residency import KEEP, RECOMPUTE
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

LAYERS = [f"h.{i}" for i in range(12)]


def cluster(memory_bytes: float, devices: int = 4) -> Cluster:
    device = Device("gpu", "gpu", (("float32", 1e12), ("bfloat16", 4e12)), memory_bytes, 1e12, 1.0, 5e-6)
    return Cluster("gpus", device, (ClusterLevel("node", devices, NetworkLink(3e-6, 2e11)),))


@pytest.mark.parametrize(
    ("word", "stage", "want"),
    [
        ("none", 0, []),
        ("selective", 0, []),
        ("full", 0, LAYERS),
        ("full:3", 1, ["h.0", "h.1", "h.2"]),
        ("full:3/1", 1, ["h.0"]),
        ("full:99", 0, LAYERS),
        ("full:h.1+h.11", 0, ["h.1", "h.11"]),
        ("full:h.1*", 0, ["h.1", "h.10", "h.11"]),
    ],
)
def test_a_word_names_layers(word: str, stage: int, want: list[str]) -> None:
    found = LayerChoice.parse("recompute", word)
    assert list(found.selected_layers(stage, LAYERS)) == want
    assert str(found) == word


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("full:", "only full and cheap take layers"),
        ("selective:2", "only full and cheap take layers"),
        ("full:0", "recomputes no layer; use recompute=none"),
        ("full:0/0", "recomputes no layer"),
        ("full:h.0+", "layers are counts by stage"),
        ("full:1/2/3", "counts layers of 3 stages, and there are 2"),
        ("fully", "unknown .did you mean full"),
    ],
)
def test_a_word_that_means_nothing_is_refused(word: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(f"pipeline=2 recompute={word}")


def test_a_layer_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"the model has no such layer; it has h\.0, h\.1$"):
        Residency.parse("full:h.9", "none").check([["h.0"], ["h.1"]])


def test_each_layer_costs_its_forward_and_saves_what_it_keeps() -> None:
    """Of six equal layers: seconds are linear in how many are repeated, memory falls by as much with each but the last, which stays."""
    pricer = Pricer(gpt(6), cluster(1e11), 8)
    words = ["none", *(f"full:{n}" for n in range(1, 7))]
    costs = [pricer.stages(Layout(recompute=word))[0] for word in words]
    steps = [b.backward_s - a.backward_s for a, b in pairwise(costs)]
    assert min(steps) > 0
    assert steps == pytest.approx([steps[0]] * 6)
    held = [c.memory.alone.activations for c in costs]
    saved = [a - b for a, b in pairwise(held)]
    assert min(saved[:5]) > 0
    assert saved[:4] == pytest.approx([saved[0]] * 4)
    full = pricer.stages(Layout(recompute="full"))[0]
    assert (full.backward_s, full.memory) == (costs[-1].backward_s, costs[-1].memory)
    named = pricer.stages(Layout(recompute="full:h.0+h.1"))[0]
    assert (named.backward_s, named.memory) == (costs[2].backward_s, costs[2].memory)


def _fits(pricer: Pricer, layout: Layout, sites: tuple[str, ...]) -> bool:
    try:
        pricer.check_memory(layout, price(pricer, layout, sites).prediction)
    except Infeasible:
        return False
    return True


@settings(max_examples=25, deadline=None)
@given(st.floats(0.02, 0.98), st.sampled_from([1, 2]), st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 4))
def test_the_fewest_layers_are_the_best_of_all_counts(tight: float, pipeline: int, schedule: str, microbatches: int) -> None:
    """Against every count of every stage, each priced and timed by the clock, under a memory somewhere between all and none."""
    graph = gpt(6)
    layout = Layout(pipeline=pipeline, microbatches=microbatches, schedule=schedule if pipeline > 1 else "1f1b", recompute="full")
    wide = Pricer(graph, cluster(1e11), 8)
    sites = balanced_sites(wide, layout) if pipeline > 1 else ()
    most, least = (price(wide, replace(layout, recompute=word), sites).prediction.memory.total for word in ("none", "full"))
    pricer = Pricer(graph, cluster(least + tight * (most - least)), 8)
    each = [len(pricer.layer_costs(layout, sites, s)) for s in range(pipeline)]
    every = [replace(layout, recompute=f"full:{'/'.join(map(str, c))}") for c in product(*(range(n + 1) for n in each)) if any(c)]
    fitting = [simulate_time(pricer, price(pricer, one, sites)) for one in every if _fits(pricer, one, sites)]
    found = choose_activation_memory(pricer, replace(layout, recompute="none"), sites, (KEEP, RECOMPUTE))
    if found is None:
        assert min(sum(_counts(p.layout, pipeline)) for p in fitting) == sum(each)
        return
    best = min(p.prediction.step_time_s for p in fitting)
    assert _fits(pricer, found, sites)
    assert simulate_time(pricer, price(pricer, found, sites)).prediction.step_time_s == pytest.approx(best)
    assert sum(_counts(found, pipeline)) == min(sum(_counts(p.layout, pipeline)) for p in fitting)


@settings(max_examples=15, deadline=None)
@given(st.floats(0.02, 0.98), st.integers(1, 6))
def test_a_split_backward_repeats_only_what_makes_it_fit(tight: float, microbatches: int) -> None:
    """What is repeated for the input part stays for the weights part, so that it saves little, or nothing at all: then none is chosen."""
    layout = Layout(pipeline=2, microbatches=microbatches, schedule="zb-h1", recompute="full")
    wide = Pricer(gpt(6), cluster(1e11), 8)
    sites = balanced_sites(wide, layout)
    most, least = (price(wide, replace(layout, recompute=word), sites).prediction.memory.total for word in ("none", "full"))
    pricer = Pricer(gpt(6), cluster(least + tight * (most - least)), 8)
    found = choose_activation_memory(pricer, replace(layout, recompute="none"), sites, (KEEP, RECOMPUTE))
    if least >= most:
        assert found is None
    elif found is not None:
        assert _fits(pricer, found, sites)


def _counts(layout: Layout, stages: int) -> tuple[int, ...]:
    counts = layout.residency.recompute.counts
    return counts * stages if len(counts) == 1 else counts


def test_the_planner_repeats_as_few_layers_as_fit() -> None:
    """Between the memory of none and of all: some, faster than all and than what else fits on one device; none where there is room."""
    graph, one = gpt(6), "data=1 tensor=1 pipeline=1 microbatches=1 zero=0 offload=none precision=float32"
    most, least = (price(Pricer(graph, cluster(1e11, 1), 8), Layout(recompute=w)).prediction.memory.total for w in ("none", "full"))
    plan = search(graph, cluster((most + least) / 2, 1), 8, "gpt", one)
    assert 1 <= plan.layout.residency.recompute.counts[0] <= 5
    assert plan.prediction is not None
    whole = search(graph, cluster((most + least) / 2, 1), 8, "gpt", f"{one} recompute=full")
    assert whole.prediction is not None
    assert whole.layout.recompute == "full"
    assert plan.prediction.step_time_s < whole.prediction.step_time_s
    assert plan.bound_gap is not None
    assert plan.bound_gap >= -1e-9
    assert search(graph, cluster(1e11, 1), 8, "gpt", one).layout.recompute == "none"
    with pytest.raises(LayoutError, match="no such layer"):
        search(graph, cluster(1e11, 1), 8, "gpt", layout=Layout(recompute="full:h.77"))
