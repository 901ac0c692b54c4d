"""Properties that no fault of a cost model excuses: more of what helps never makes the best plan slower, and figures agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cluster.heterogeneous import mix_clusters, order_parts
from shardwise.cost.network.network import RankGroup, collective_s, straddles_units
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer
from shardwise.errors import Infeasible, LayoutError, UsageError
from shardwise.model.graph import Graph
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.solve.search import search
from shardwise.solve.space import smaller_rank_counts
from tests.support.gpt_graph import gpt

GPU = Device("gpu", "gpu", (("float32", 1e13), ("bfloat16", 1e14)), 1e10, 1e12, 1.0, 5e-6)
ROUNDING = 1.009  # the search tells no times apart that differ by less than 0.4 %, twice where what it starts from does as well
LARGE = gpt(layers=2, hidden=1024, heads=16, sequence=256, vocabulary=4096, batch=16)


def gpus(node: int, nodes: int = 1, bandwidth: float = 1e10, inner: float = 2e11, memory: float = 1e10) -> Cluster:
    levels = (
        ClusterLevel("node", node, NetworkLink(3e-6, inner)),
        *([ClusterLevel("cluster", nodes, NetworkLink(1e-5, bandwidth))] if nodes > 1 else []),
    )
    return Cluster("gpus", replace(GPU, memory_bytes=memory), levels, 10.0 * node * nodes, 500.0 * node * nodes)


def best(cluster: Cluster, constraints: str = "", graph: Graph = LARGE) -> Plan:
    return search(graph, cluster, 16, "m", constraints)


def step_s(cluster: Cluster, constraints: str = "") -> float:
    found = best(cluster, constraints).prediction
    assert found is not None
    return found.step_time_s


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2))


@given(SIZES)
@settings(max_examples=4, deadline=None)
def test_another_node_never_makes_the_best_plan_slower(size: tuple[int, int]) -> None:
    node, nodes = size
    assert step_s(gpus(node, nodes + 1)) <= ROUNDING * step_s(gpus(node, nodes))


@pytest.mark.parametrize(("node", "nodes", "bandwidth"), [(8, 4, 1e7), (6, 5, 1e10), (8, 7, 1e10)])
def test_a_large_cluster_is_never_slower_than_what_a_part_of_it_does(node: int, nodes: int, bandwidth: float) -> None:
    """Slow links between nodes, and numbers of devices among which neither batch nor model divides."""
    alone = step_s(gpus(node))
    found = best(gpus(node, nodes, bandwidth))
    assert found.prediction is not None
    assert found.prediction.step_time_s <= ROUNDING * alone


def test_broken_twin_all_devices_are_not_always_the_fastest() -> None:
    cluster = gpus(8, 4, 1e7)
    assert step_s(cluster, "ranks=32") > 1.5 * step_s(cluster)


def test_smaller_jobs_are_units_and_powers_of_two() -> None:
    assert smaller_rank_counts(gpus(8)) == []
    for node, nodes in ((8, 4), (6, 5), (72, 5), (8, 1536)):
        counts = smaller_rank_counts(gpus(node, nodes))
        assert counts[0] == node
        assert len(set(counts)) == len(counts)
        assert all(1 <= k < node * nodes for k in counts)
        assert max(counts) >= node * nodes // 2


def test_a_number_of_ranks_that_is_no_divisor_can_be_asked_for() -> None:
    assert best(gpus(6, 5), "ranks=16").layout.num_ranks == 16


@given(SIZES, st.floats(1.5, 8))
@settings(max_examples=2, deadline=None)
def test_faster_links_and_more_memory_are_never_slower(size: tuple[int, int], times: float) -> None:
    node, nodes = size
    base = step_s(gpus(node, nodes, memory=3e9))
    assert step_s(gpus(node, nodes, bandwidth=1e10 * times, memory=3e9)) <= ROUNDING * base
    assert step_s(gpus(node, nodes, inner=2e11 * times, memory=3e9)) <= ROUNDING * base
    assert step_s(gpus(node, nodes, memory=3e9 * times)) <= ROUNDING * base


@pytest.mark.parametrize(
    ("tight", "loose"),
    [
        ("tensor=2", "tensor<=2"), ("tensor<=2", ""), ("pipeline=4", "pipeline>=2"), ("zero=1", "zero<=1"), ("microbatches=4", ""),
        ("precision=float32", ""), ("data>=4", "data>=2"), ("recompute=full", ""),
    ],
)  # fmt: skip
def test_a_looser_constraint_is_never_slower(tight: str, loose: str) -> None:
    cluster = gpus(2, 2)
    assert step_s(cluster, loose) <= ROUNDING * step_s(cluster, tight)


@pytest.mark.parametrize("cluster", [gpus(1), gpus(3), gpus(7), gpus(2, 2)], ids=lambda c: str(c.num_devices))
def test_figures_of_a_plan_agree_and_survive_its_file(cluster: Cluster) -> None:
    plan = best(cluster)
    p = plan.prediction
    assert p is not None
    peak = cluster.device.peak(plan.layout.precision) * plan.layout.num_ranks
    assert p.mfu == pytest.approx(p.model_flops / (p.step_time_s * peak))
    assert sum(seconds for _, seconds in p.parts) == pytest.approx(p.step_time_s)
    assert p.memory.total <= cluster.memory_of(plan.layout.num_ranks)
    again = parse_plan(format_plan(plan))
    assert again == plan
    cuts = {axis: dict(names) for axis, names in again.shards}
    by_hand = search(LARGE, cluster, 16, "m", layout=again.layout, shards=cuts or None, stages=again.stages).prediction  # type: ignore[arg-type]
    assert by_hand is not None
    assert by_hand.step_time_s == pytest.approx(p.step_time_s, rel=1e-6)
    assert by_hand.memory == p.memory


def test_groups_that_do_not_divide_a_node_lie_across_its_border() -> None:
    """Of ranks 0-2, 3-5, 6-8, ... on nodes of 8 the third group lies on two nodes, so the links between nodes carry its sum."""
    cluster, size = gpus(8, 3, bandwidth=1e9), 1e8
    assert straddles_units(RankGroup(3, 1, 24), 8)
    assert not straddles_units(RankGroup(3, 1, 6), 8)  # all on one node
    assert not straddles_units(RankGroup(4, 1, 24), 8)
    assert not straddles_units(RankGroup(3, 8, 24), 8)  # one rank a node
    across = collective_s(cluster, "all_reduce", size, RankGroup(3, 1, 24))
    least = size / 1e9  # over the border at least one summand goes, and the sum comes back: what a port carries, each way
    assert across >= least > 10 * collective_s(cluster, "all_reduce", size, RankGroup(4, 1, 24))


def test_replicas_that_go_both_ways_lie_on_two_kinds_of_devices() -> None:
    """Chimera has every stage on ranks r and p - 1 - r, so none lies on the fast part alone: it is not priced as if it did."""
    slow = replace(gpus(4), name="slow", device=replace(GPU, peak_flops=(("float32", 1e12), ("bfloat16", 1e13)), name="old"))
    cluster = mix_clusters("both", [replace(gpus(4), name="fast"), slow], NetworkLink(1e-5, 1e10))
    pricer = HeterogeneousPricer(LARGE, cluster, 16)
    layout = Layout.parse("data=4 pipeline=2 microbatches=4")
    assert pricer.has_aligned_stages(layout)
    assert not pricer.has_aligned_stages(replace(layout, schedule="chimera"))


def test_parts_in_an_order_by_name() -> None:
    cluster = mix_clusters("both", [replace(gpus(4), name="a"), replace(gpus(2), name="b")], NetworkLink(1e-5, 1e10))
    found = order_parts(replace(cluster, origin="c.toml"), ["b", "a"])
    assert ([part.name for part in found.parts], found.source_text) == (["b", "a"], "c.toml:b+a")
    assert order_parts(found, ["a", "b"]).parts == cluster.parts
    with pytest.raises(UsageError, match="b is no order of the parts of both, which are a, b"):
        order_parts(cluster, ["b"])


@pytest.mark.parametrize(
    ("layout", "constraints", "error", "said"),
    [
        ("data=2", "data=4", Infeasible, "data=2 .* is not what the constraint data=4 admits"),
        ("data=2", "ranks=8", Infeasible, "ranks=8"),
        ("data=2 expert=2", "", LayoutError, "expert=2 .* it has none"),
        ("data=2 threads=2", "", LayoutError, "processors' cores"),
        ("data=2 recompute=full:9", "", LayoutError, "which has"),
    ],
)
def test_layouts_by_hand_that_ask_for_what_is_not_there(layout: str, constraints: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        search(LARGE, gpus(4, 2), 16, "m", constraints, Layout.parse(layout))


@pytest.mark.parametrize("kind", ["float64", "float16", "bfloat16"])
def test_devices_of_one_precision_are_planned_in_it(kind: str) -> None:
    cluster = replace(gpus(4), device=replace(GPU, peak_flops=((kind, 1e13),)))
    assert best(cluster).layout.precision == kind


def test_devices_of_no_planned_precision() -> None:
    with pytest.raises(Infeasible, match="float8 alone"):
        best(replace(gpus(4), device=replace(GPU, peak_flops=(("float8", 1e13),))))


@pytest.mark.parametrize("constraints", ["zero=3 data=1", "chunks=2 pipeline=1", "sequence_parallel=on tensor=1", "microbatches=64"])
def test_every_remedy_is_a_layout_that_fits(constraints: str) -> None:
    """What the error says would do is done: the layout of each remedy is priced, without the constraint that it leaves out."""
    with pytest.raises(Infeasible) as caught:
        best(gpus(4, 2), constraints)
    said = str(caught.value).partition("What would do: ")[2]
    remedies = [one.partition(", for example ") for one in said.split("; ")]
    assert len(remedies) == len(constraints.split())
    for without, _, layout in remedies:
        rest = " ".join(word for word in constraints.split() if word != without.removeprefix("without "))
        assert rest != constraints
        assert search(LARGE, gpus(4, 2), 16, "m", rest, Layout.parse(layout)).prediction is not None


def test_what_fits_on_no_number_of_devices_says_how_large_they_must_be() -> None:
    """A layer that cannot be cut into little enough: more devices would not do, so none are promised; the size that is named does."""
    graph, cluster = gpt(layers=1, hidden=1024, heads=16, sequence=256, vocabulary=4096, batch=16), gpus(2, memory=4e6)
    with pytest.raises(Infeasible, match=r"What would do: devices of ([\d.]+ [KMG]iB) each") as caught:
        search(graph, cluster, 16, "m", "tensor=1 pipeline=1 offload=none")
    from shardwise.units import parse_bytes

    size = parse_bytes(str(caught.value).partition("devices of ")[2].partition(" each")[0])
    larger = replace(cluster, device=replace(cluster.device, memory_bytes=float(size)))
    assert search(graph, larger, 16, "m", "tensor=1 pipeline=1 offload=none").prediction is not None
