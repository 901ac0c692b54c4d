"""Move, repeat or keep: against trying everything, in the chooser's model and in prices, and by hand where the answer is plain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.devices import devices as devices_module
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.devices import HostCopies
from shardwise.cost.stages.base import LayerCost
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import PricedLayout, balanced_sites, price, simulate_time
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.plan.residency import Residency
from shardwise.solve.activation_memory import residency
from shardwise.solve.activation_memory.choose import choose_activation_memory, with_layer_choices
from shardwise.solve.activation_memory.residency import (
    ALL_CHOICES,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    MemoryBudget,
    StageLayers,
    choose_layers,
    encode_choices,
)
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

EQUAL = tuple(LayerCost(f"h.{i}", 1.0, 4.0, 0.0) for i in range(6))


def room(limit: float, bytes_per_s: float, beside: bool = True, layers: tuple[LayerCost, ...] = EQUAL) -> MemoryBudget:
    forward = sum(layer.forward_s for layer in layers)
    return MemoryBudget(limit, Seconds(forward, 2 * forward), HostCopies(1 / bytes_per_s, beside), num_loaded_layers=1 + beside)


def seconds_of(layers: Sequence[LayerCost], choices: Sequence[str], where: MemoryBudget) -> float:
    return float(StageLayers(layers).seconds(encode_choices([choices]), where)[0])


def bytes_of(layers: Sequence[LayerCost], choices: Sequence[str], where: MemoryBudget) -> float:
    return float(StageLayers(layers).peak_bytes(encode_choices([choices]), where)[0])


@pytest.fixture
def free_of_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies beside the compute do not slow it."""
    monkeypatch.setattr(devices_module, "HOST_SLOWS", 0.0)


def test_what_fits_is_kept() -> None:
    assert choose_layers(EQUAL, room(24.0, 1.0)) == (KEEP,) * 6
    assert seconds_of(EQUAL, (KEEP,) * 6, room(24.0, 1.0)) == 18.0


@pytest.mark.usefixtures("free_of_charge")
def test_copies_that_hide_cost_nothing_and_the_rest_is_repeated() -> None:
    """Three layers must go. At 4 bytes a second six copies hide behind a forward of 6 s; at 1.4 two do; at 0.04 none."""
    fast = choose_layers(EQUAL, room(12.0, 4.0))
    assert fast == (OFFLOAD,) * 3 + (KEEP,) * 3
    assert seconds_of(EQUAL, fast, room(12.0, 4.0)) == 18.0
    some = choose_layers(EQUAL, room(12.0, 1.4))
    assert some == (OFFLOAD, OFFLOAD, RECOMPUTE, KEEP, KEEP, KEEP)
    assert seconds_of(EQUAL, some, room(12.0, 1.4)) == 19.0
    slow = choose_layers(EQUAL, room(12.0, 0.04))
    assert slow == (RECOMPUTE,) * 3 + (KEEP,) * 3
    assert seconds_of(EQUAL, slow, room(12.0, 0.04)) == 21.0


def test_in_the_computes_time_a_copy_is_weighed_against_a_forward() -> None:
    """There and back a copy takes 2 x 4 bytes: less than a forward above 8 bytes a second, more below."""
    assert choose_layers(EQUAL, room(12.0, 9.0, beside=False)) == (OFFLOAD,) * 3 + (KEEP,) * 3
    assert choose_layers(EQUAL, room(12.0, 7.0, beside=False)) == (RECOMPUTE,) * 3 + (KEEP,) * 3


def test_layers_that_are_dear_to_repeat_are_moved() -> None:
    """Of layers that differ, those that take long for their bytes move and the cheap ones are repeated, wherever they stand."""
    layers = (
        LayerCost("a", 0.1, 8.0, 0.0),
        LayerCost("b", 9.0, 8.0, 0.0),
        LayerCost("c", 0.1, 8.0, 0.0),
        LayerCost("d", 9.0, 8.0, 0.0),
        LayerCost("e", 1.0, 8.0, 0.0),
    )
    assert choose_layers(layers, room(8.0, 10.0, beside=False, layers=layers)) == (RECOMPUTE, OFFLOAD, RECOMPUTE, OFFLOAD, KEEP)


def test_what_never_fits_is_said() -> None:
    with pytest.raises(Infeasible, match="the largest saves 4"):
        choose_layers(EQUAL, room(3.0, 1.0))


sizes = st.floats(0.5, 8.0)
different = st.lists(st.tuples(sizes, sizes), min_size=1, max_size=7).map(
    lambda rows: tuple(LayerCost(str(i), f, s, 0.3) for i, (f, s) in enumerate(rows))
)
alike = st.tuples(st.integers(6, 8), sizes, sizes).map(lambda row: tuple(LayerCost(str(i), row[1], row[2], 0.3) for i in range(row[0])))


def _tried(layers: tuple[LayerCost, ...], where: MemoryBudget) -> float | None:
    """The least seconds of all choices that fit."""
    fitting = [one for one in product(ALL_CHOICES, repeat=len(layers)) if bytes_of(layers, one, where) <= where.limit_bytes]
    return min((seconds_of(layers, one, where) for one in fitting), default=None)


@settings(max_examples=80, deadline=None)
@given(st.one_of(different, alike), st.floats(0.2, 1.1), st.floats(0.1, 20.0), st.booleans(), st.floats(1.0, 3.0))
def test_the_choice_is_as_fast_as_trying_everything(
    layers: tuple[LayerCost, ...], share: float, speed: float, beside: bool, flying: float
) -> None:
    where = replace(room(share * flying * sum(one.saved_bytes for one in layers), speed, beside, layers), num_in_flight=flying)
    least = _tried(layers, where)
    if least is None:
        with pytest.raises(Infeasible):
            choose_layers(layers, where)
        return
    found = choose_layers(layers, where)
    assert bytes_of(layers, found, where) <= where.limit_bytes * (1 + 1e-9)
    same = len({one.forward_s for one in layers}) == 1
    assert seconds_of(layers, found, where) <= (1 + 1e-6 if same or len(layers) <= 5 else 1.02) * least


def test_a_chooser_without_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Did nothing take room, a smaller device would cost nothing."""
    where = room(12.0, 0.5)
    assert seconds_of(EQUAL, choose_layers(EQUAL, where), where) > 18.0
    monkeypatch.setattr(residency.StageLayers, "peak_bytes", lambda _, tried, where: np.zeros(len(tried)))
    assert seconds_of(EQUAL, choose_layers(EQUAL, where), where) == 18.0


def cluster(memory_bytes: float, flops: float = 1e12, devices: int = 2) -> Cluster:
    device = Device("gpu", "gpu", (("float32", flops), ("bfloat16", 4 * flops)), memory_bytes, 1e12, 1.0, 5e-6)
    return Cluster("gpus", device, (ClusterLevel("node", devices, NetworkLink(3e-6, 2e11)),))


def _fits(pricer: Pricer, layout: Layout, sites: tuple[str, ...]) -> PricedLayout | None:
    priced = price(pricer, layout, sites)
    try:
        pricer.check_memory(layout, priced.prediction)
    except Infeasible:
        return None
    return simulate_time(pricer, priced)


@settings(max_examples=12, deadline=None)
@given(st.floats(0.02, 0.98), st.sampled_from([1e11, 4e11, 1e12]), st.integers(1, 3), st.sampled_from(["none", "optimizer"]))
def test_the_planners_choice_is_the_best_of_all_prices(tight: float, flops: float, microbatches: int, offload: str) -> None:
    """One stage of four layers, on devices whose copies hide or do not: against every choice, each priced with its own memory."""
    graph, layout = gpt(4), Layout(microbatches=microbatches, offload=offload)
    most, least = (
        price(Pricer(graph, cluster(1e11, flops), 12), replace(layout, recompute=w)).prediction.memory.total for w in ("none", "full")
    )
    pricer = Pricer(graph, cluster(least + tight * (most - least), flops), 12)
    names = [one.name for one in pricer.layer_costs(layout, (), 0)]
    every = [with_layer_choices(layout, [(names, choices)]) for choices in product(ALL_CHOICES, repeat=4)]
    fitting = [found for one in every if (found := _fits(pricer, one, ())) is not None]
    best = min(one.prediction.step_time_s for one in fitting)
    found = choose_activation_memory(pricer, layout, ())
    if found is None:
        found = replace(layout, recompute="full")
    mine = _fits(pricer, found, ())
    assert mine is not None
    assert mine.prediction.step_time_s == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("tight", [0.1, 0.5, 0.8])
def test_of_a_pipeline_every_stage_has_its_best(schedule: str, tight: float) -> None:
    """Two stages, timed by the clock of the program: against all counts of both."""
    graph, layout = gpt(6), Layout(pipeline=2, microbatches=4, schedule=schedule)
    wide = Pricer(graph, cluster(1e11, 4e11), 8)
    sites = balanced_sites(wide, layout)
    most, least = (price(wide, replace(layout, recompute=word), sites).prediction.memory.total for word in ("none", "full"))
    pricer = Pricer(graph, cluster(least + tight * (most - least), 4e11), 8)
    each = [[one.name for one in pricer.layer_costs(layout, sites, s)] for s in range(2)]
    counts = [[(k, d) for k in range(len(names) + 1) for d in range(len(names) + 1 - k)] for names in each]
    every = [
        with_layer_choices(
            layout, [(n, (OFFLOAD,) * k + (RECOMPUTE,) * d + (KEEP,) * (len(n) - k - d)) for n, (k, d) in zip(each, pair, strict=True)]
        )
        for pair in product(*counts)
    ]
    fitting = [found for one in every if (found := _fits(pricer, one, sites)) is not None]
    best = min(one.prediction.step_time_s for one in fitting)
    found = choose_activation_memory(pricer, layout, sites) or replace(layout, recompute="full")
    mine = _fits(pricer, found, sites)
    assert mine is not None
    assert mine.prediction.step_time_s <= best * (1 + 1e-3)


BATCH = 64
ONE = "data=1 tensor=1 pipeline=1 microbatches=1 zero=0 precision=float32"


def _planned(share: float, flops: float, more: str = "offload!=optimizer") -> tuple[Plan, float]:
    graph = gpt(8)
    wide = Pricer(graph, cluster(1e11, flops, 1), BATCH)
    most, least = (price(wide, Layout(recompute=word)).prediction.memory.total for word in ("none", "full"))
    have = least + share * (most - least)
    return search(graph, cluster(have, flops, 1), BATCH, "gpt", f"{ONE} {more} offload!=all"), have


def test_the_planner_mixes_where_that_is_the_fastest() -> None:
    """Some copies hide, all of them do not: layers move, are repeated and stay; faster than repeating alone, moving all or both all."""
    flops = 1.5e12
    plan, have = _planned(0.15, flops)
    which = plan.layout.residency
    assert which.recompute.is_partial
    assert which.offload.is_partial
    assert plan.prediction is not None
    assert plan.prediction.memory.total <= have
    for more in ("offload=none", "offload=none recompute=full", "offload=activations"):
        try:
            other = search(gpt(8), cluster(have, flops, 1), BATCH, "gpt", f"{ONE} {more}")
        except Infeasible:
            continue
        assert other.prediction is not None
        assert plan.prediction.step_time_s < other.prediction.step_time_s, more
    assert plan.bound_gap is not None
    assert plan.bound_gap >= -1e-9
    words = dict(plan.reasons)["layers"]
    counts = which.offload.counts[0], which.recompute.counts[0]
    assert f"of 8 layers {counts[0]} are offloaded to the host" in words
    assert f"{counts[1]} are recomputed" in words
    assert parse_plan(format_plan(plan)) == plan
    assert Layout.parse(str(plan.layout)) == plan.layout


def test_constraints_bind_the_mixture() -> None:
    for more, moves, repeats in (("offload=none", False, True), ("recompute=none offload!=optimizer", True, False)):
        plan, _ = _planned(0.5, 1.5e12, more)
        assert plan.layout.offloads_layers is moves
        assert plan.layout.recomputes_layers is repeats


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("offload=none:2", "only activations and all take layers; for example offload=activations:2"),
        ("offload=optimizer:2", "only activations and all take layers"),
        ("offload=activations:", "only activations and all take layers"),
        ("offload=activations:0", "offloads no layer; use offload=none"),
        ("offload=all:0/0", "offloads no layer; use offload=optimizer"),
        ("offload=activations:h.0+", "layers are counts by stage"),
        ("offload=activations:1/2/3", "offload=activations:1/2/3 counts layers of 3 stages, and there are 2"),
        ("offload=activation:2", "unknown .did you mean activations"),
    ],
)
def test_a_word_that_means_nothing_is_refused(words: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(f"pipeline=2 {words}")


STAGES = [["h.0", "h.1", "h.2"], ["h.3", "h.4"]]


@pytest.mark.parametrize(
    ("recompute", "offload", "said"),
    [
        ("none", "activations:h.9", r"offload=activations:h\.9: the model has no such layer; it has h\.0-4$"),
        (
            "full:2",
            "activations:2",
            "2 offloaded and 2 others recomputed are 4 layers of stage 0, which has 3; .*activations:2 recompute=full:1/0$",
        ),
        ("full:0/2", "all:1", "1 offloaded and 2 others recomputed are 3 layers of stage 1, which has 2; .*all:1 recompute=full:0/1$"),
        ("full:2", "activations:h.0+h.1", "2 offloaded and 2 others recomputed are 4 layers of stage 0, which has 3; .*=full:1/2$"),
        ("full:9", "none", "recompute=full:9: 9 layers of stage 0, which has 3; use at most recompute=full:3/2$"),
        ("full", "activations:9", "offload=activations:9: 9 layers of stage 0, which has 3; use at most offload=activations:3/2$"),
        ("none", "all:3/3", "offload=all:3/3: 3 layers of stage 1, which has 2; use at most offload=all:3/2$"),
        ("full:h.1+h.3", "activations:h.1", r"1 of the 3 layers of stage 0 would be both offloaded and recomputed \(h\.1\)"),
        ("full:h.4", "activations:2", r"1 of the 2 layers of stage 1 would be both offloaded and recomputed \(h\.4\)"),
    ],
)
def test_layers_that_are_not_there_or_would_be_both_are_refused(recompute: str, offload: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Residency.parse(recompute, offload).check(STAGES)


@pytest.mark.parametrize(
    ("recompute", "offload", "moved", "again"),
    [
        ("full", "activations:1", ["h.0"], ["h.1", "h.2"]),
        ("full:1", "activations:1", ["h.0"], ["h.1"]),
        ("full:1", "all:h.1", ["h.1"], ["h.0"]),
        ("full:h.2", "activations:2", ["h.0", "h.1"], ["h.2"]),
        ("full:2", "activations", ["h.0", "h.1", "h.2"], ["h.0", "h.1"]),  # of those that are repeated, what enters them moves
        ("selective", "activations:1", ["h.0"], []),
        ("none", "activations:3", ["h.0", "h.1", "h.2"], []),
        ("full:1", "activations:2", ["h.0", "h.1"], ["h.2"]),
    ],
)
def test_words_together(recompute: str, offload: str, moved: list[str], again: list[str]) -> None:
    both = Residency.parse(recompute, offload)
    both.check([STAGES[0]])
    assert list(both.offloaded_layers(0, STAGES[0])) == moved
    assert list(both.recomputed_layers(0, STAGES[0])) == again
