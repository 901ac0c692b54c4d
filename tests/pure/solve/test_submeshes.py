"""Stages with unlike numbers of ranks are searched where devices differ: all of them, none missed, and taken where they are cheaper."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli.changes import refit_layout
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cluster.heterogeneous import mix_clusters, reorder_parts
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer, build_pricer
from shardwise.cost.step_time.timing import PricedLayout, has_fill_drain_bubble, price, simulate_time
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.solve import bounds, branch_and_bound
from shardwise.solve.bounds import base_lower_bound_s, layout_lower_bound_s
from shardwise.solve.checks import check_priced
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.moves.submeshes import stage_width_options, submesh_bases
from shardwise.solve.search import search
from shardwise.solve.space import SearchSpace
from tests.support.gpt_graph import gpt

FAST = Device("fast", "gpu", (("float32", 4e12), ("bfloat16", 4e13)), 1e10, 4e11, 1.0, 1e-7)
SLOW = replace(FAST, name="slow", peak_flops=(("float32", 2e12), ("bfloat16", 2e13)), memory_bandwidth_bytes_per_s=2e11)


def part(device: Device, number: int) -> Cluster:
    return Cluster(device.name, device, (ClusterLevel("node", number, NetworkLink(1e-6, 1e11)),))


def fast_and_slow(fast: int, slow: int, between: float = 1e10) -> Cluster:
    return mix_clusters("both", [part(FAST, fast), part(SLOW, slow)], NetworkLink(1e-5, between))


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@pytest.mark.parametrize("number", range(2, 8))
def test_all_pairs_of_widths_on_one_kind_of_devices(number: int) -> None:
    """Against every way to cut so many devices into stages, of which those count that have two widths one after another."""
    cuts = chain.from_iterable(combinations(range(1, number), k) for k in range(1, 8))
    rows = [tuple(b - a for a, b in pairwise((0, *cut, number))) for cut in cuts]
    wanted = {row for row in rows if sum(a != b for a, b in pairwise(row)) == 1}
    found = [tuple(width for count, width in one for _ in range(count)) for one in stage_width_options(part(FAST, number))]
    assert len(set(found)) == len(found)
    # Stages of equally many ranks divide a power of two.
    assert set(found) == (wanted if number & (number - 1) else set())


def test_every_part_of_a_mixed_cluster_has_stages_of_its_own() -> None:
    found = {tuple(width for count, width in one for _ in range(count)) for one in stage_width_options(fast_and_slow(2, 4))}
    assert found == {(2, 4), (2, 1, 1, 1, 1), (1, 1, 4), (1, 1, 2, 2)}
    layouts = list(submesh_bases(SearchSpace(fast_and_slow(2, 4), 8, parse_constraints("precision=bfloat16 pipeline=2 tensor<=2"))))
    assert {layout.inner for layout in layouts} == {"2x1/4x1", "2x1/2x2", "1x2/4x1", "1x2/2x2"}
    pricer = build_pricer(gpt(4), fast_and_slow(2, 4), 8)
    assert isinstance(pricer, HeterogeneousPricer)
    assert all(pricer.has_aligned_stages(layout) for layout in layouts)
    assert not pricer.has_aligned_stages(Layout.parse("pipeline=2 inner=4x1/2x1"))


@pytest.mark.parametrize(
    "text", ["ranks=2", "data=4", "tensor=4", "expert=2", "compress=int8", "schedule=interleaved", "staleness=1", "spatial=2", "tensor=1x2"]
)
def test_constraints_that_such_stages_do_not_meet(text: str) -> None:
    space = SearchSpace(part(FAST, 3), 8, parse_constraints(text))
    assert not [one for base in submesh_bases(space) for one in space.variants(base)]


def every_unlike(cluster: Cluster, graph_layers: int, batch: int, constraints: str) -> list[PricedLayout]:
    """All that `submesh_bases` has, in full, on parts in any order: each is held against its bounds."""
    found = []
    for one in (cluster, reorder_parts(cluster, (1, 0))) if cluster.parts else (cluster,):
        pricer = build_pricer(gpt(graph_layers, hidden=256, sequence=256, batch=batch), one, batch)
        space = SearchSpace(one, batch, parse_constraints(constraints), len(pricer.cuts) + 1)
        for base in submesh_bases(space):
            for layout in space.variants(base):
                try:
                    priced = price(pricer, layout)
                    check_priced(pricer, priced)
                except (Infeasible, LayoutError):
                    continue
                timed = simulate_time(pricer, priced)
                interleaved = not has_fill_drain_bubble(layout)
                for least in (base_lower_bound_s(pricer, base, interleaved), layout_lower_bound_s(pricer, layout, interleaved)):
                    assert 0 < least <= timed.prediction.step_time_s * (1 + 1e-9), f"{layout} beats its bound"
                found.append(timed)
    return found


@pytest.mark.parametrize("cluster", [fast_and_slow(1, 2), part(FAST, 3)], ids=["1+2", "3"])
@pytest.mark.parametrize("batch", [4, 6])
def test_the_search_misses_none(cluster: Cluster, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    constraints = "precision=bfloat16 zero<=1 offload=none recompute=none"
    every = every_unlike(cluster, 4, batch, constraints)
    graph = gpt(4, hidden=256, sequence=256, batch=batch)
    plan = search(graph, cluster, batch, "gpt", constraints)
    monkeypatch.setattr(branch_and_bound, "submesh_bases", lambda space: iter(()))
    alike = search(graph, cluster, batch, "gpt", constraints)
    best = min(step_s(alike), min(one.prediction.step_time_s for one in every))
    assert best * (1 - 1e-9) <= step_s(plan) <= 1.005 * best
    assert plan.bound_gap is not None
    assert plan.bound_gap >= -1e-9


def test_one_fast_and_two_slow_devices_get_a_stage_each_where_that_is_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples: three replicas would have two, one and one. The fast device has some layers alone, and the slow ones the rest, each
    with half of the samples, so that all three finish a microbatch together; prices say by how much."""
    graph, cluster = gpt(8, hidden=256, sequence=256, batch=4), fast_and_slow(1, 2)
    plan = search(graph, cluster, 4, "gpt", "precision=bfloat16")
    assert plan.layout.inner in ("1x1/2x1", "2x1/1x1")
    assert plan.layout.num_ranks == 3
    reasons = dict(plan.reasons)
    assert reasons["parts"].count("rank") == 2
    assert "stages of as many ranks each takes" in reasons["inner"] or "one stage takes" in reasons["inner"]
    pricer = build_pricer(graph, cluster if plan.layout.inner == "1x1/2x1" else reorder_parts(cluster, (1, 0)), 4)
    costs = price(pricer, plan.layout, plan.stages).costs
    assert costs[0].compute.total == pytest.approx(costs[1].compute.total, rel=0.35)
    monkeypatch.setattr(branch_and_bound, "submesh_bases", lambda space: iter(()))
    alike = search(graph, cluster, 4, "gpt", "precision=bfloat16")
    assert not alike.layout.inner
    assert step_s(plan) < 0.9 * step_s(alike)


def test_a_plan_of_such_stages_is_changed_key_by_key() -> None:
    """What leaves the stages as they are keeps their ranks; what changes an axis makes them alike."""
    old = Layout.parse("pipeline=2 inner=1x1/2x1 microbatches=4 zero=1")
    said = {}
    for key, value in (("microbatches", 8), ("inner", "2x1/1x1"), ("pipeline", 3), ("tensor", 3), ("zero", 2)):
        layout, moved = refit_layout(old, {key: value, **({"pipeline": 1} if key == "tensor" else {})}, 3, 16, 16)
        assert layout.num_ranks == 3
        said[key] = str(layout), moved
    assert said["microbatches"] == ("data=1 tensor=1 pipeline=2 microbatches=8 zero=1 inner=1x1/2x1", "")
    assert said["inner"][0].endswith("inner=2x1/1x1")
    assert said["pipeline"] == ("data=1 tensor=1 pipeline=3 microbatches=4 zero=1", "without inner")
    assert said["tensor"][0].startswith("data=1 tensor=3 pipeline=1")
    assert said["zero"][0].endswith("zero=2 inner=1x1/2x1")


def test_devices_that_are_alike_and_divide_the_batch_have_stages_that_are_alike() -> None:
    assert not search(gpt(8, hidden=256, sequence=256, batch=12), part(FAST, 3), 12, "gpt", "precision=bfloat16").layout.inner


def test_a_slow_link_between_the_parts_is_counted() -> None:
    """What crosses takes longer than what it saves: then no stage lies on the other side."""
    plan = search(gpt(8, hidden=256, sequence=256, batch=4), fast_and_slow(1, 2, between=1e7), 4, "gpt", "precision=bfloat16")
    assert not plan.layout.inner


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=5), st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_no_division_of_the_layers_beats_the_bound(alone_s: list[float], microbatches: int, seed: int) -> None:
    """Against random divisions, and the one that makes all of these equal where there is one."""
    base, rng = Layout(pipeline=len(alone_s), microbatches=microbatches), random.Random(seed)
    least, even = (bounds._unequal_stages_lower_bound_s(base, alone_s, one) for one in (False, True))
    assert even <= least * (1 + 1e-12)

    def taken(parts: list[float]) -> float:
        busy = [part * seconds for part, seconds in zip(parts, alone_s, strict=True)]
        return max(sum(busy[:s]) + microbatches * busy[s] for s in range(len(busy)))

    for _ in range(30):
        weights = [rng.random() ** 3 for _ in alone_s]
        assert taken([w / sum(weights) for w in weights]) >= least * (1 - 1e-9)
    equal = Layout(pipeline=len(alone_s), microbatches=microbatches)
    assert bounds._unequal_stages_lower_bound_s(base, [3.0] * base.pipeline, False) == pytest.approx(
        3.0 * microbatches / base.pipeline * bounds.pipeline_fill_factor(equal)
    )


def test_the_bound_is_reached() -> None:
    """Of a few divisions on a fine grid the best comes as near as the grid is fine: two stages, the second half as fast."""
    base = Layout(pipeline=2, microbatches=3)
    grid = ((p / 1000, 1 - p / 1000) for p in range(1001))
    best = min(max(3 * p * 1.0, p * 1.0 + 3 * q * 2.0) for p, q in grid)
    assert bounds._unequal_stages_lower_bound_s(base, [1.0, 2.0], False) == pytest.approx(best, rel=2e-3)
