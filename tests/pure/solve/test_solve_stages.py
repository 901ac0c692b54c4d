"""Stages on devices of different speed and memory against every split; known results of the whole search on real clusters' figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cluster.heterogeneous import mix_clusters
from shardwise.cost.step_time.balance import minimize_slowest_stage, stage_memory_matrix, stage_time_matrix_s
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer, build_pricer
from shardwise.cost.step_time.timing import balanced_sites, price
from shardwise.errors import Infeasible
from shardwise.plan.layout import Layout
from shardwise.solve.search import search
from tests.support.closed_forms import in_flight
from tests.support.gpt_graph import gpt


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], list[float], int, str, int, list[float], list[float]]:
    n = draw(st.integers(1, 8))
    p = draw(st.integers(1, n))
    positive = st.floats(0.01, 10)
    units = draw(st.lists(positive, min_size=n, max_size=n))
    # Bytes are whole numbers, whose sums are exact: what needs all that there is fits.
    size, peaks = ([float(b) for b in draw(st.lists(st.integers(1, 10), min_size=n, max_size=n))] for _ in range(2))
    cross = draw(st.lists(st.floats(0, 3), min_size=n - 1, max_size=n - 1))
    slow = draw(st.lists(st.sampled_from([1.0, 1.0, 2.5]), min_size=p, max_size=p))
    have = draw(st.lists(st.sampled_from([1e9, 30.0, 60.0, 120.0]), min_size=p, max_size=p))
    return units, cross, size, peaks, p, draw(st.sampled_from(["1f1b", "gpipe"])), draw(st.integers(1, 6)), slow, have


@given(pipelines())
@settings(max_examples=300, deadline=None)
def test_stages_on_unlike_devices_are_the_best_that_fit(case: tuple[list[float], ...]) -> None:
    """Seconds by the stage's device, bytes by its device and by the microbatches that its place keeps in flight."""
    units, cross, size, peaks, p, schedule, m, slow, have = case  # type: ignore[misc]
    n = len(units)
    flying = [in_flight(schedule, p, k, m) for k in range(p)]
    border = [0.0, *cross, 0.0]

    def seconds(k: int, a: int, b: int) -> float:
        return slow[k] * (sum(units[a:b]) + border[a] + border[b])

    def fits(k: int, a: int, b: int) -> bool:
        return flying[k] * sum(size[a:b]) + max(peaks[a:b]) <= have[k]

    every = []
    for starts in combinations(range(1, n), p - 1):
        stages = list(enumerate(pairwise((0, *starts, n))))
        if all(fits(k, a, b) for k, (a, b) in stages):
            every.append(max(seconds(k, a, b) for k, (a, b) in stages))
    matrix = stage_time_matrix_s(units, cross)
    sizes = [stage_memory_matrix([f * s for s in size], peaks) for f in flying]
    given_s = [np.where(held <= h, matrix * w, np.inf) for held, w, h in zip(sizes, slow, have, strict=True)]
    if not every:
        with pytest.raises(Infeasible, match="no split"):
            minimize_slowest_stage(given_s)
        return
    starts, slowest = minimize_slowest_stage(given_s)
    assert slowest == pytest.approx(min(every))
    ends = list(enumerate(pairwise((0, *starts, n))))
    assert max(seconds(k, a, b) for k, (a, b) in ends) == pytest.approx(slowest)
    assert all(fits(k, a, b) for k, (a, b) in ends)


FAST = Device("fast", "gpu", (("float32", 4e12), ("bfloat16", 4e13)), 1e10, 4e11, 1.0, 1e-7)
SLOW = replace(FAST, name="slow", peak_flops=(("float32", 1e12), ("bfloat16", 1e13)), memory_bandwidth_bytes_per_s=1e11)
NODE = ClusterLevel("node", 2, NetworkLink(1e-6, 1e11))


def unlike(order: tuple[Device, ...] = (FAST, SLOW), between: float = 1e11) -> Cluster:
    return mix_clusters("unlike", [Cluster(d.name, d, (NODE,)) for d in order], NetworkLink(1e-6, between))


def test_the_faster_part_gets_more_layers() -> None:
    pricer = build_pricer(gpt(8, hidden=256, sequence=256, batch=16), unlike(), 16)
    assert isinstance(pricer, HeterogeneousPricer)
    layout = Layout(data=2, pipeline=2, microbatches=8, precision="bfloat16")
    priced = price(pricer, layout)
    fast, slow = (c.forward_s + c.backward_s for c in priced.costs)
    assert abs(fast - slow) < 0.35 * max(fast, slow)
    alike = price(build_pricer(pricer.graph, unlike((SLOW, SLOW)), 16), layout)
    (cut,), (even,) = balanced_sites(pricer, layout), alike.sites
    place = {op.site: i for i, op in enumerate(pricer.graph.operators)}
    assert place[cut] > place[even]
    assert priced.prediction.step_time_s < alike.prediction.step_time_s


def test_a_mixed_cluster_is_planned_over_its_parts_or_as_its_slowest() -> None:
    graph = gpt(8, hidden=256, sequence=256, batch=16)
    plan = search(graph, unlike(between=1e9), 16, "gpt", "precision=bfloat16")
    slowest = search(graph, unlike((SLOW, SLOW), 1e9), 16, "gpt", "precision=bfloat16")
    assert plan.prediction is not None
    assert slowest.prediction is not None
    assert plan.prediction.step_time_s < slowest.prediction.step_time_s
    assert "fast" in dict(plan.reasons)["parts"]


def test_each_stage_is_held_to_the_memory_of_its_own_part() -> None:
    graph = gpt(8, hidden=256, sequence=256, batch=16)
    layout = Layout(data=2, pipeline=2, microbatches=8, precision="bfloat16")
    free = price(build_pricer(graph, unlike(), 16), layout)
    small = replace(SLOW, memory_bytes=0.9 * free.costs[1].memory.alone.total)
    with pytest.raises(Infeasible, match="pipeline rank 1, on slow, needs"):
        search(graph, unlike((FAST, small)), 16, "gpt", layout=layout)


def test_cards_of_24_and_12_gb_are_each_filled_to_their_own() -> None:
    """The model fits no two cards of 12 GB in halves; with one of 24 GB the plan gives that one more layers, and says both sizes."""
    part = Cluster.parse("rtx-3090")
    small = replace(part, name="small", device=replace(part.device, memory_bytes=12.88e9))
    graph = gpt(24, hidden=2048, heads=16, sequence=512, vocabulary=51200, batch=8)
    mixed = mix_clusters("both", [replace(part, name="big"), small], part.levels[0].link)
    wanted = "precision=bfloat16 pipeline=2 recompute=none offload=none zero=0"
    plan = search(graph, mixed, 8, "gpt", wanted)
    assert plan.prediction is not None
    assert small.device.memory_bytes < plan.prediction.memory.total <= part.device.memory_bytes
    assert "big 24.0 GiB, small 12.0 GiB" in dict(plan.reasons)["memory"]
    with pytest.raises(Infeasible):
        search(graph, mix_clusters("both", [small, replace(small, name="other")], part.levels[0].link), 8, "gpt", wanted)


def test_large_models_are_cut_within_nodes_and_piped_between_them() -> None:
    """Narayanan et al. 2021, takeaway 1: tensor parallelism up to the node's size, the pipeline across nodes."""
    graph = gpt(24, hidden=8192, heads=64, sequence=1024, vocabulary=51200, batch=256)
    plan = search(graph, Cluster.parse("8xp4d.24xlarge"), 256, "gpt-20b", "precision=bfloat16 zero<=1")
    assert plan.layout.tensor > 1
    assert plan.layout.tensor <= 8
    assert plan.layout.pipeline > 1


def test_what_fits_is_trained_by_data() -> None:
    graph = gpt(12, hidden=768, heads=12, sequence=1024, vocabulary=51200, batch=256)
    plan = search(graph, Cluster.parse("2xdgx-a100-80"), 256, "gpt-125m")
    assert (plan.layout.tensor, plan.layout.pipeline) == (1, 1)
    assert plan.layout.data == 16


def test_what_would_do_is_said_and_does() -> None:
    graph = gpt(8, hidden=1024, heads=16, sequence=256, vocabulary=4096, batch=8)
    device = replace(FAST, memory_bytes=1.2e9)
    cluster = Cluster("small", device, (NODE,))
    with pytest.raises(Infeasible, match=r"without data=2, for example data=") as refused:
        search(graph, cluster, 8, "gpt", "data=2 zero=0 precision=float32 offload=none")
    said = str(refused.value).partition("without data=2, for example ")[2].partition(";")[0]
    search(graph, cluster, 8, "gpt", layout=Layout.parse(said))
    with pytest.raises(Infeasible, match=r"such devices \(\d+ times as many\), for example data="):
        search(graph, replace(cluster, device=replace(device, memory_bytes=2e8)), 8, "gpt", "offload=none")
