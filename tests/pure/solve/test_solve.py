"""The search: the space against enumeration, stages against every split, the choice against every priced layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.devices.compute import Seconds
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.balance import balance_stages, select_cuts
from shardwise.cost.step_time.timing import (
    PricedLayout,
    computes_by_rank,
    has_fill_drain_bubble,
    pipeline_lower_bound_s,
    simulate_timeline,
    stage_trips_lower_bound_s,
)
from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.model.graph import Graph
from shardwise.model.stages.stages import stage_links
from shardwise.plan.compatibility import UNCAPTURED_WITH
from shardwise.plan.ir.schedule_sizes import SCHEDULES
from shardwise.plan.layout import KEYS, Layout
from shardwise.plan.plan import Plan, check_uncaptured
from shardwise.schedules import schedule_of
from shardwise.simulate.memory import peak_saved_bytes
from shardwise.solve import branch_and_bound
from shardwise.solve.axis_candidates import has_mixed_traffic
from shardwise.solve.bounds import base_lower_bound_s, layout_lower_bound_s
from shardwise.solve.checks import num_blocks, num_experts
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.infeasible import infeasible_error
from shardwise.solve.score import simplest_plan
from shardwise.solve.search import check_layout, price, search, simulate_time
from shardwise.solve.space import SearchSpace, divisors_of, iterate_layouts
from shardwise.solve.uncaptured import plan_without_graph
from shardwise.units import parse_bytes
from tests.support.closed_forms import BOTH_WAYS
from tests.support.gpt_graph import gpt
from tests.support.small_graphs import alexnet, experts

CORE = Device("core", "cpu", (("float32", 1e11), ("bfloat16", 4e11)), 8e9, 2e10, 1.0, 2e-6)
NODE = Cluster("node", CORE, (ClusterLevel("node", 4, NetworkLink(1e-4, 1e9)),))
GPU = Device("gpu", "gpu", (("float32", 1e13), ("bfloat16", 1e14)), 1e10, 1e12, 1.0, 5e-6)
GPUS = Cluster("gpus", GPU, (ClusterLevel("node", 4, NetworkLink(3e-6, 2e11)), ClusterLevel("cluster", 2, NetworkLink(1e-5, 1e10))))


@given(
    st.lists(st.floats(0.01, 10), min_size=2, max_size=9).flatmap(
        lambda units: st.tuples(
            st.just(units), st.lists(st.floats(0, 3), min_size=len(units) - 1, max_size=len(units) - 1), st.integers(1, len(units))
        )
    )
)
def test_stages_are_the_best_of_every_split(case: tuple[list[float], list[float], int]) -> None:
    units, crossings, p = case
    n = len(units)

    def slowest(starts: tuple[int, ...]) -> float:
        ends = (0, *starts, n)
        border = [0.0, *crossings, 0.0]
        return max(sum(units[a:b]) + border[a] + border[b] for a, b in pairwise(ends))

    starts, found = balance_stages(units, crossings, p)
    assert slowest(starts) == pytest.approx(found)
    assert found == pytest.approx(min(slowest(s) for s in combinations(range(1, n), p - 1)))


def test_broken_twin_equal_counts_are_not_balance() -> None:
    units = [1.0, 1.0, 1.0, 9.0]
    assert balance_stages(units, [0, 0, 0], 2)[1] == 9.0 < sum(units[2:])


def test_more_stages_than_units() -> None:
    with pytest.raises(Infeasible, match="5 pipeline stages but only 3 places"):
        balance_stages([1, 1, 1], [0, 0], 5)


def test_divisors() -> None:
    assert all(divisors_of(n) == [d for d in range(1, n + 1) if n % d == 0] for n in range(1, 200))


@given(st.integers(1, 24))
@settings(max_examples=20, deadline=None)
def test_the_space_has_every_legal_layout_once(batch: int) -> None:
    found = list(iterate_layouts(NODE, batch))
    assert len(set(found)) == len(found)
    sizes = {(x.data, x.tensor, x.pipeline, x.microbatches) for x in found}
    legal = {
        (d, t, p, m)
        for d, t, p, m in product(range(1, 5), range(1, 5), range(1, 5), range(1, batch + 1))
        if d * t * p <= 4 and d * m <= batch and -(-batch // d) % m == 0 and -(-batch // d) * d <= batch * 9 / 8
    }
    assert sizes == legal
    for layout in found:
        check_layout(layout, NODE, batch)
        assert layout.num_ranks * max(1, layout.threads) <= NODE.num_devices


def test_microbatches_of_a_batch_of_any_size_are_its_few_smallest_divisors() -> None:
    """All divisors of a batch of 10^20 would take hours to list; those of 10^14 were listed anew for every mesh, for minutes."""
    found = {x.microbatches for x in iterate_layouts(NODE, 10**20, parse_constraints("ranks=1 precision=float32"))}
    assert found == {2**a * 5**b for a in range(21) for b in range(21) if 2**a * 5**b <= 512}


@pytest.mark.parametrize(
    "text", ["tensor<=2", "pipeline=2", "precision=float32 data>=2", "zero=1", "threads=1", "microbatches!=1 tensor<2", "schedule=gpipe"]
)
def test_constraints_are_a_filter(text: str) -> None:
    limits = parse_constraints(text)
    everything = list(iterate_layouts(NODE, 8))
    kept = set(iterate_layouts(NODE, 8, limits))
    wanted = {x for x in everything if all(c.admits(getattr(x, c.key)) for c in limits)}
    if "schedule" not in text:  # without a pipeline the schedule means nothing, and both names stay legal
        assert kept >= wanted
    assert kept
    assert all(c.admits(getattr(x, c.key)) for x in kept for c in limits if c.key != "schedule" or x.pipeline > 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tensr<=2", "did you mean tensor"),
        ("tensor", "is not KEY"),
        ("tensor<=two", "whole number"),
        ("precision<float32", "is a word"),
        ("precision=bfloat", "did you mean bfloat16"),
    ],
)
def test_constraints_that_mean_nothing(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_constraints(text)


@pytest.mark.parametrize(
    "text", ["tensor<=2 tensor>=4", "data<1", "precision=float32 precision=bfloat16", "zero>3", "pipeline=2 pipeline=4"]
)
def test_contradictions_are_named(text: str) -> None:
    with pytest.raises(Infeasible, match=f"no {text[:4]}.* meets {text.split()[0]}"):
        parse_constraints(text)


def test_constraints_that_the_cluster_cannot_meet() -> None:
    with pytest.raises(Infeasible, match=r"no layout of 4 devices for a batch of 8 under 'data=4 tensor=4'"):
        search(gpt(2), NODE, 8, "gpt", "data=4 tensor=4")


def every_plan(pricer: Pricer, space: SearchSpace) -> list[PricedLayout]:
    """Every layout of the space that fits, each timed by the clock: what the search must not miss. Shares no bound with it."""
    found = []
    for base in space.bases():
        for layout in space.variants(base):
            try:
                priced = price(pricer, layout)
                pricer.check_memory(layout, priced.prediction)
            except Infeasible:
                continue
            found.append(simulate_time(pricer, priced))
    return found


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[Cluster, Graph, int, str]:
    """Two to eight devices with links, memory and speeds of any proportion, small models, few constraints."""
    inner, outer = draw(st.sampled_from([(2, 1), (2, 2), (4, 1)]))
    memory = draw(st.sampled_from([1e10, 6e6, 3e6, 1.5e6]))
    flops = 10 ** draw(st.floats(9, 13))
    device = Device("gpu", "gpu", (("float32", flops / 8), ("bfloat16", flops)), memory, 10 ** draw(st.floats(9, 12)), 1.0, 5e-6)
    levels = [ClusterLevel("node", inner, NetworkLink(3e-6, 10 ** draw(st.floats(7, 11))))]
    if outer > 1:
        levels.append(ClusterLevel("cluster", outer, NetworkLink(1e-5, 10 ** draw(st.floats(6, 10)))))
    batch = draw(st.sampled_from([2, 4, 6]))
    kind = draw(st.sampled_from(["gpt", "gpt", "alexnet", "experts"]))
    graph = (
        gpt(draw(st.integers(1, 3)), hidden=draw(st.sampled_from([16, 64])), batch=batch)
        if kind == "gpt"
        else alexnet(batch, image=32)
        if kind == "alexnet"
        else experts(batch, hidden=64, inner=256, count=2)
    )
    constraints = "precision=bfloat16" + draw(st.sampled_from(["", " tensor<=2", " zero<=1"]))
    return Cluster("any", device, tuple(levels)), graph, batch, constraints


@given(small_problems())
@settings(max_examples=12, deadline=None)
def test_the_choice_is_the_best_of_all_plans(problem: tuple[Cluster, Graph, int, str]) -> None:
    cluster, graph, batch, constraints = problem
    pricer = Pricer(graph, cluster, batch)
    limits = parse_constraints(constraints)
    layers, unlike = len(select_cuts(pricer.cuts, 1)) + 1, has_mixed_traffic(graph, batch)
    more = {"experts": num_experts(graph), "unlike": unlike, "num_blocks": num_blocks(graph)}
    every = every_plan(pricer, SearchSpace(cluster, batch, limits, len(pricer.cuts) + 1, layers, **more))
    if not every:
        with pytest.raises(Infeasible, match="What would do"):
            search(graph, cluster, batch, "gpt", constraints)
        return
    plan = search(graph, cluster, batch, "gpt", constraints)
    best = min(p.prediction.step_time_s for p in every)
    assert plan.prediction is not None
    assert plan.prediction.step_time_s <= 1.005 * best  # times within 0.4 % are the same
    if plan.bound_gap is not None:
        assert plan.bound_gap >= -1e-9
        assert best * (1 + plan.bound_gap) >= 0.995 * plan.prediction.step_time_s
    for one in every:
        least = layout_lower_bound_s(pricer, replace(one.layout, schedule="1f1b", chunks=1), not has_fill_drain_bubble(one.layout))
        assert least <= one.prediction.step_time_s * (1 + 1e-9), f"{one.layout} beats its bound"


@given(
    st.integers(2, 5),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v"]),
    st.integers(0, 30),
    st.integers(0, 2**32 - 1),
)
@example(2, "zb-h2", 30, 2)  # the slow rank uses up its head start only after eleven microbatches
@example(3, "1f1b", 30, 37)  # repeats itself every two microbatches, which three are no multiple of
@settings(max_examples=12, deadline=None)
def test_many_microbatches_are_timed_by_a_part_of_them(ranks: int, schedule: str, more: int, seed: int) -> None:
    """Against timing all of them, stages as unlike as the balanced ones are: never too much, and little too little."""
    rng = random.Random(seed)
    chunks = {"interleaved": rng.choice([2, 3]), "zb-v": 2}.get(schedule, 1)
    graph = gpt(max(4, 2 * ranks * chunks), hidden=16, batch=1)
    pricer = Pricer(graph, GPUS, 1)
    microbatches = 8 * ranks + more * (ranks if schedule == "interleaved" else 1)
    layout = Layout(pipeline=ranks, microbatches=microbatches, schedule=schedule, chunks=chunks)
    pricer.batch_size = layout.microbatches
    priced = price(pricer, layout)
    uneven = tuple(
        replace(c, compute=Seconds(c.compute.forward * rng.uniform(0.9, 1.1), c.compute.backward * rng.uniform(0.9, 1.1)))
        for c in priced.costs
    )
    priced = replace(priced, costs=uneven)
    part, whole = (simulate_time(pricer, priced, is_full=whole).prediction.step_time_s for whole in (False, True))
    assert 0.985 * whole <= part <= whole * (1 + 1e-9)
    even = replace(priced, costs=(priced.costs[0],) * len(priced.costs))
    part, whole = (simulate_time(pricer, even, is_full=whole).prediction.step_time_s for whole in (False, True))
    assert part == pytest.approx(whole, rel=1e-9)


def test_the_plan_compares_every_axis() -> None:
    plan = search(gpt(4, hidden=64, batch=2), NODE, 8, "gpt")
    assert plan.candidates[0].layout == plan.layout
    assert {key for key, _ in plan.reasons} >= {"step", "data", "tensor", "pipeline", "precision", "memory"}


def test_a_small_model_stays_on_few_ranks_and_a_slow_network_is_avoided() -> None:
    slow = replace(NODE, levels=(ClusterLevel("node", 4, NetworkLink(5e-2, 1e5)),))
    assert search(gpt(2), slow, 8, "gpt").layout.num_ranks == 1


def test_a_hand_layout_is_checked_and_priced_the_same_way() -> None:
    graph = gpt(4)
    layout = Layout.parse("data=2 pipeline=2 microbatches=4")
    plan = search(graph, NODE, 16, "gpt", layout=layout)
    assert plan.layout == layout
    assert len(plan.stages) == 1
    pricer = Pricer(graph, NODE, 16)
    assert plan.prediction == simulate_time(pricer, price(pricer, layout)).prediction
    again = search(graph, NODE, 16, "gpt", layout=layout, stages=plan.stages)
    assert again.prediction == plan.prediction


@pytest.mark.parametrize(
    ("layout", "cluster", "batch", "said"),
    [
        ("data=32", NODE, 16, "16 samples has 0 for each of data=32"),
        ("data=16", GPUS, 16, "needs 16 devices, gpus has 8"),
        ("pipeline=4000", NODE, 16, "can be cut in"),
        ("precision=float64", GPUS, 16, "gpu has no float64"),
    ],
)
def test_hand_layouts_that_cannot_be(layout: str, cluster: Cluster, batch: int, said: str) -> None:
    with pytest.raises(Infeasible, match=said):
        search(gpt(2), cluster, batch, "gpt", layout=Layout.parse(layout))


def test_stages_of_another_model_are_refused() -> None:
    with pytest.raises(LayoutError, match="no such operator"):
        search(gpt(2), NODE, 16, "gpt", layout=Layout(pipeline=2), stages=("encoder.7/linear",))


def test_nothing_fits() -> None:
    tiny = replace(GPUS, device=replace(GPU, memory_bytes=2e5))
    said = r"layouts? fits gpus: the leanest, .* needs 505 KiB .*, which has 195 KiB. What would do: devices of 508 KiB each"
    with pytest.raises(Infeasible, match=said):
        search(gpt(4), tiny, 16, "gpt")


def test_what_holds_no_weights_is_refused_before_anything_is_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory than weights need on every device, beside what a process holds before it has any: nothing to propagate or to bound."""

    def priced(*_: object) -> float:
        raise AssertionError("a base that cannot fit was bounded")

    monkeypatch.setattr(branch_and_bound, "base_lower_bound_s", priced)
    held = replace(GPU, memory_bytes=1e9, scratch_bytes=1e9 - 1024)
    with pytest.raises(Infeasible, match="What would do: devices of"):
        search(gpt(4), replace(GPUS, device=held), 16, "gpt")


def test_remedies_are_constraints_that_were_given() -> None:
    """What follows from the model itself cannot be left out; of several that exclude each other more than one must go."""
    with pytest.raises(Infeasible, match="leave out more than one of data=7, tensor=5, pipeline=2, or change the batch"):
        search(gpt(4), GPUS, 16, "gpt", "data=7 tensor=5 pipeline=2")
    pricer = Pricer(gpt(2), GPUS, 16)
    own = parse_constraints("data=1 microbatches=1 ranks=3")
    said = str(infeasible_error(pricer, SearchSpace(GPUS, 16, own), "ranks=3", None, []))
    assert "without data=1" not in said
    assert "without microbatches=1" not in said


def test_where_a_limit_was_set_a_limit_is_the_remedy() -> None:
    """What is said would do does."""
    with pytest.raises(Infeasible, match="What would do: a limit of") as caught:
        search(gpt(4), GPUS.with_memory_limit(2e5), 16, "gpt")
    enough = parse_bytes(str(caught.value).rsplit("a limit of ", 1)[1])
    assert search(gpt(4), GPUS.with_memory_limit(enough), 16, "gpt").prediction is not None


def test_memory_decides_where_time_would_not() -> None:
    """With less and less memory the plan takes more microbatches, ZeRO, recomputation or a pipeline, and never one that does not fit."""
    graph = gpt(4, hidden=128, sequence=128, batch=4)
    free = search(graph, GPUS, 16, "gpt").prediction
    assert free is not None
    last = 0.0
    for part in (1.0, 0.7, 0.5, 0.35):
        memory = free.memory.total * part
        plan = search(graph, replace(GPUS, device=replace(GPU, memory_bytes=memory)), 16, "gpt")
        assert plan.prediction is not None
        assert plan.prediction.memory.total <= memory
        assert plan.prediction.step_time_s >= last * 0.98
        last = plan.prediction.step_time_s


def test_precision_follows_the_device() -> None:
    plan = search(gpt(2, hidden=256, sequence=64), NODE, 16, "gpt")
    assert plan.layout.precision == "bfloat16"
    only = replace(NODE, device=replace(CORE, peak_flops=(("float32", 1e11),)))
    assert search(gpt(2, hidden=256, sequence=64), only, 16, "gpt").layout.precision == "float32"
    assert search(gpt(2, hidden=256, sequence=64), NODE, 16, "gpt", "precision=float32").layout.precision == "float32"


@pytest.mark.parametrize("objective", ["time", "cost", "energy", "memory"])
def test_objectives(objective: str) -> None:
    plan = search(gpt(2), NODE, 8, "gpt", objective=objective)
    every = [c.prediction for c in plan.candidates if c.prediction]
    assert plan.prediction is not None
    if objective == "memory":
        assert plan.prediction.memory.total == min(p.memory.total for p in every)
    with pytest.raises(UsageError, match="unknown objective"):
        search(gpt(2), NODE, 8, "gpt", objective="speed")


def test_a_model_that_cannot_be_captured_is_trained_by_data() -> None:
    plan = plan_without_graph(1000, "it branches on data", NODE, 8, "odd")
    assert (plan.layout.data, plan.layout.tensor, plan.layout.pipeline) == (4, 1, 1)
    assert plan.uncaptured == "it branches on data"
    with pytest.raises(Infeasible, match="only data and zero apply"):
        plan_without_graph(1000, "it branches on data", NODE, 8, "odd", layout=Layout(tensor=2))
    with pytest.raises(Infeasible, match="GiB"):
        plan_without_graph(10**12, "it branches on data", NODE, 8, "odd")


def test_every_key_is_allowed_or_refused_for_a_model_that_runs_whole() -> None:
    assert set(UNCAPTURED_WITH) == set(KEYS)
    for words in (
        "tensor=2", "tensor=2x2", "pipeline=2", "data=2 expert=2", "context=2", "spatial=2", "channel=2", "branch=2", "recompute=full",
        "tensor=2 sequence_parallel=on", "data=2 zero=3", "offload=activations", "compile=on", "data=2 batch_norm=local",
        "data=2 context=2 split=lengths microbatches=2", "pipeline=2 microbatches=2 chunks=2 schedule=interleaved", "data=2 shares=3/1",
    ):  # fmt: skip
        with pytest.raises(Infeasible, match="only data and zero apply; use "):
            check_uncaptured(Layout.parse(words), "it branches on data")
    for words in ("data=2", "data=2 zero=2 microbatches=2", "data=2 offload=optimizer", "data=2 staleness=1", "precision=bfloat16"):
        check_uncaptured(Layout.parse(words), "it branches on data")


def test_a_model_that_cannot_be_captured_is_divided_as_far_as_its_trial_allows() -> None:
    def trial(most: int) -> Callable[[Plan], None]:
        def tried(plan: Plan) -> None:
            if plan.layout.data > most:
                raise Infeasible(f"a part of {plan.layout.data} is another model")

        return tried

    plan = plan_without_graph(1000, "it branches on data", NODE, 8, "odd", trial=trial(2))
    assert plan.layout.data == 2
    assert "a part of 4 is another model" in dict(plan.reasons)["data"]
    with pytest.raises(Infeasible, match="a part of 4"):
        plan_without_graph(1000, "it branches on data", NODE, 8, "odd", layout=Layout(data=4), trial=trial(2))
    with pytest.raises(Infeasible, match="a part of 4"):
        plan_without_graph(1000, "it branches on data", NODE, 8, "odd", trial=trial(0))


def test_useful_cuts_are_where_little_crosses() -> None:
    pricer = Pricer(gpt(4), NODE, 8)
    found = select_cuts(pricer.cuts, 3)
    assert len(found) >= 6
    assert max(c.size_bytes for c in found) <= sorted(c.size_bytes for c in pricer.cuts)[len(pricer.cuts) // 2]


def test_the_least_memory_is_the_least_of_all_plans() -> None:
    graph = gpt(2, hidden=64, batch=4)
    cluster = replace(GPUS, levels=(ClusterLevel("node", 4, NetworkLink(3e-6, 2e11)),))
    limits = parse_constraints("precision=bfloat16 offload=none")
    pricer = Pricer(graph, cluster, 4)
    layers = len(select_cuts(pricer.cuts, 1)) + 1
    every = every_plan(pricer, SearchSpace(cluster, 4, limits, len(pricer.cuts) + 1, layers))
    plan = search(graph, cluster, 4, "gpt", "precision=bfloat16 offload=none", objective="memory")
    assert plan.prediction is not None
    assert plan.prediction.memory.total == pytest.approx(min(p.prediction.memory.total for p in every))


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.integers(1, 6), st.integers(1, 14), st.integers(1, 3), st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
def test_every_schedule_is_priced_as_its_program_runs(schedule: str, p: int, m: int, chunks: int, seed: int) -> None:
    """Against the clock on the program itself: its time, the work of every rank, the bound that prunes it, what it keeps."""
    if schedule in BOTH_WAYS:
        p, m = 2 * -(-p // 2), 2 if schedule == "gems-mast" else 2 * -(-m // 2)
    assume(schedule != "interleaved" or p > 1)
    layout = Layout(pipeline=p, microbatches=m, schedule=schedule, chunks=chunks if schedule == "interleaved" else 1)
    pricer = Pricer(gpt(max(2, layout.num_stages), hidden=16, batch=1), GPUS, m)
    priced = price(pricer, layout)
    rng = random.Random(seed)
    costs = [Seconds(rng.uniform(0.5, 2.0), rng.uniform(0.5, 2.0)) for _ in priced.costs]
    part = rng.uniform(0, 1)
    priced = replace(
        priced,
        costs=tuple(
            replace(c, compute=s, collectives=Seconds(), weight_s=part * s.backward) for c, s in zip(priced.costs, costs, strict=True)
        ),
    )
    shown = simulate_timeline(pricer, priced)
    parts = dict(simulate_time(pricer, priced).prediction.parts)
    pipeline_s = sum(parts[name] for name in ("compute", "tensor", "pipeline"))
    if p > 1:
        assert pipeline_s == pytest.approx(shown.total_s)
        assert parts["compute"] == pytest.approx(max(shown.busy_s(rank) for rank in range(p)))
    trips = [(c.forward_s, c.forward_s + c.backward_s) for c in priced.costs]
    assert pipeline_lower_bound_s(layout, trips) <= shown.total_s * (1 + 1e-9)
    most = peak_saved_bytes(computes_by_rank(layout, stage_links(pricer.stages_at(priced.sites))), [1.0] * layout.num_stages)
    for rank in range(p):
        mine = schedule_of(layout).stages_of[rank]
        several = schedule.startswith("gems") or len(mine) == 1  # of one stage at a time
        counted = schedule_of(layout).in_flight(mine[0]) * (1 if several else len(mine))
        assert counted == most[rank], f"{layout}: rank {rank} keeps {most[rank]}, priced as {counted}"


def test_replicas_in_both_directions_hold_and_sum_every_weight_twice() -> None:
    """Chimera beside 1F1B of the same stages: the weights, gradients and states of two stages; gradients summed with the other rank."""
    graph = gpt(4, hidden=64, batch=1)
    pricer = Pricer(graph, GPUS, 8)
    plain, both = (price(pricer, Layout(pipeline=4, microbatches=8, schedule=name)) for name in ("1f1b", "chimera"))
    assert both.sites == plain.sites
    for part in ("parameters", "gradients", "optimizer"):
        of = [getattr(c.memory.alone, part) for c in plain.costs]
        assert getattr(both.prediction.memory, part) == pytest.approx(max(of[0] + of[3], of[1] + of[2]))
    assert all(b.gradients_s > a.gradients_s for a, b in zip(plain.costs, both.costs, strict=True))
    assert [b.optimizer_s for b in both.costs] == [a.optimizer_s for a in plain.costs]
    assert dict(both.prediction.parts)["optimizer"] == pytest.approx(
        max(both.costs[0].optimizer_s + both.costs[3].optimizer_s, both.costs[1].optimizer_s + both.costs[2].optimizer_s)
    )


def test_half_of_a_products_backward_is_for_its_weight() -> None:
    """Between nothing and half of a stage's backward, of which attention's scores and what has no weights are no part."""
    pricer = Pricer(gpt(4, hidden=1024, sequence=64, batch=1), GPUS, 8)
    for cost in price(pricer, Layout(pipeline=4, microbatches=8)).costs:
        assert 0.25 * cost.backward_s < cost.weight_s < 0.5 * cost.backward_s


def test_zero_bubble_is_searched_on_gpus_and_others_where_they_are_asked_for() -> None:
    base = Layout(pipeline=4, microbatches=8)
    names = [one.schedule for one in SearchSpace(GPUS, 8, num_chunks=8).schedules(base)]
    assert {"zb-h1", "zb-h2", "zb-v"} <= set(names)
    assert not {"chimera", "gems-mast", "gems-master"} & set(names)
    assert {one.schedule for one in SearchSpace(NODE, 8, num_chunks=8).schedules(base)} == {"1f1b", "gpipe", "interleaved"}
    for name in ("chimera", "gems-master"):
        asked = SearchSpace(NODE, 8, parse_constraints(f"schedule={name}"), num_chunks=8)
        assert [one.schedule for one in asked.schedules(base)] == [name]
    plan = search(gpt(4, hidden=64, batch=1), GPUS, 8, "gpt", "schedule=chimera pipeline=4")
    assert (plan.layout.schedule, plan.layout.pipeline) == ("chimera", 4)


def test_the_simplest_of_plans_about_as_fast_is_chosen() -> None:
    """Tensor ranks meet in every layer: within a fiftieth of the step (CPUs) or a hundredth (GPUs) they are not chosen."""
    one = price(Pricer(gpt(2), NODE, 8), Layout())

    def timed(layout: Layout, seconds: float) -> PricedLayout:
        return replace(one, layout=layout, prediction=replace(one.prediction, step_time_s=seconds))

    tensor, sharded = timed(Layout(tensor=2), 1.0), timed(Layout(data=2, zero=2), 1.005)
    near, far, alone = timed(Layout(data=2), 1.015), timed(Layout(data=2), 1.03), timed(Layout(), 1.018)
    assert simplest_plan([sharded, near, tensor], tensor, NODE, "time") is near
    assert simplest_plan([sharded, near, alone, tensor], tensor, NODE, "time") is alone
    assert simplest_plan([sharded, far, tensor], tensor, NODE, "time") is sharded
    assert simplest_plan([far, tensor], tensor, NODE, "time") is tensor
    assert simplest_plan([], tensor, NODE, "time") is tensor
    assert simplest_plan([sharded, near, tensor], tensor, GPUS, "time") is sharded
    assert simplest_plan([near, tensor], tensor, GPUS, "time") is tensor
    assert simplest_plan([near, alone, tensor], tensor, GPUS, "cost") is alone  # one rank, by device hours
    assert simplest_plan([sharded, near, tensor], tensor, NODE, "memory") is tensor


def test_no_candidate_is_the_chosen_plan_under_another_name_and_no_sentence_is_repeated() -> None:
    plan = search(gpt(2), GPUS, 8, "gpt")
    predictions = [c.prediction for c in plan.candidates if c.prediction is not None and not c.note]
    assert len(predictions) > 3
    assert all(a != b for i, a in enumerate(predictions) for b in predictions[:i])
    sentences = [text.partition(": ")[2].partition(" takes ")[2] for _, text in plan.reasons]
    said = [text for text in sentences if text]
    assert len(said) > 2
    assert len(said) == len(set(said))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_bounds_with_full_recomputation_repeat_what_the_price_does(kind: str) -> None:
    """Embeddings and the loss are not run again; a bound that runs them again would leave out plans that may be the best."""
    pricer = Pricer(gpt(4), replace(NODE, device=replace(CORE, kind=kind)), 8)
    plain, again = (pricer.stages(Layout(microbatches=4, recompute=r))[0] for r in ("none", "full"))
    repeated = again.backward_s - plain.backward_s
    assert 0 < repeated < plain.forward_s
    whole = [sum(both for _, both in stage_trips_lower_bound_s(pricer, Layout(microbatches=4), full)) for full in (False, True)]
    assert whole[1] - whole[0] == pytest.approx(repeated)
    once = [base_lower_bound_s(pricer, Layout(microbatches=4), False, full) for full in (False, True)]
    assert once[1] - once[0] == pytest.approx(4 * repeated)


def test_experts_are_spread_where_their_weights_outweigh_their_tokens() -> None:
    """The planner takes `expert` by itself: each rank sums and keeps 1/n of the weights, and a few tokens travel."""
    graph = experts(tokens=64, hidden=1024, inner=8192, count=8)
    plan = search(graph, GPUS, 64, "experts", "tensor=1 pipeline=1")
    alone = search(graph, GPUS, 64, "experts", "tensor=1 pipeline=1 expert=1")
    assert plan.layout.expert > 1
    assert plan.prediction is not None
    assert alone.prediction is not None
    assert plan.prediction.step_time_s < 0.7 * alone.prediction.step_time_s
    few = experts(tokens=4096, hidden=256, inner=64, count=8)
    assert search(few, GPUS, 4096, "experts", "tensor=1 pipeline=1").layout.expert == 1
