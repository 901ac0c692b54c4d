"""Tensor ranks that cut samples: convolutions by data and fully connected layers by model, found by propagation and by the whole search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.errors import Infeasible, LayoutError
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import Prices, Sharding
from shardwise.plan.layout import Layout
from shardwise.report.placements import placement_rows
from shardwise.solve.axis_candidates import has_mixed_traffic
from shardwise.solve.search import search
from shardwise.solve.space import SearchSpace
from tests.support.gpt_graph import gpt
from tests.support.placements_oracle import solve_placements
from tests.support.small_graphs import alexnet

BATCH = 1024
GPU = Device("gpu", "gpu", (("float32", 2e13), ("bfloat16", 3e14)), 80e9, 2e12, 1.0, 1e-7)
PRICES = Prices(flops_per_s=4e12, memory_bytes_per_s=1e12, link_bytes_per_s=2.5e9, latency_s=7e-5)


def node(bandwidth: float, size: int = 8) -> Cluster:
    return Cluster("node", GPU, (ClusterLevel("node", size, NetworkLink(1e-5, bandwidth)),))


def check_krizhevsky(found: Sharding, axes: tuple[str, ...]) -> None:
    """Every convolution cut by samples over all axes, with whole weights; the first two fully connected layers by features."""
    graph = alexnet(BATCH)
    cut = dict(found.shards["tensor"])
    assert not {name for name in cut if name.startswith("conv")}
    assert {"fc0.weight", "fc1.weight"} <= set(cut)
    for op in graph.operators:
        if op.target.startswith("aten.conv2d"):
            assert [found.labels[op.name][axis] for axis in axes] == ["n"] * len(axes), op.site


@pytest.mark.parametrize("sizes", [{"tensor": 16}, {"data": 2, "tensor": 8}, {"data": 4, "tensor": 2}])
def test_alexnet_by_samples_and_by_features(sizes: dict[str, int]) -> None:
    """Krizhevsky 2014. With data as well, tensor ranks cut the pieces of data once more. Gradients of images, which training never asks
    for, once cost more than all that the first convolution saves, so that every convolution was computed whole by every rank."""
    found = propagate(alexnet(BATCH), sizes, prices=PRICES, samples=True)
    check_krizhevsky(found, tuple(sizes))
    again = propagate(alexnet(BATCH), sizes, found.shards, samples=True)  # as a run has it, from the cuts of weights alone
    check_krizhevsky(again, tuple(sizes))


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_propagation_cuts_what_the_integer_programme_does(ranks: int) -> None:
    pytest.importorskip("highspy")
    graph = alexnet(BATCH)
    best = solve_placements(graph, {"tensor": ranks}, prices=PRICES, batch_cut=["tensor"])
    found = propagate(graph, {"tensor": ranks}, prices=PRICES, samples=True)
    assert set(found.shards["tensor"]) == set(best.shards["tensor"])


def test_samples_are_left_to_data_unless_asked_for() -> None:
    found = propagate(alexnet(BATCH), {"tensor": 8}, prices=PRICES)
    assert "n" not in {found.labels[op.name]["tensor"] for op in alexnet(BATCH).operators if op.target.startswith("aten.conv2d")}


@pytest.mark.parametrize("bandwidth", [1.2e10, 2.4e10])
def test_the_search_finds_it_where_links_are_slow(bandwidth: float) -> None:
    graph = alexnet(BATCH)
    plan = search(graph, node(bandwidth), BATCH, "alexnet")
    other = search(graph, node(bandwidth), BATCH, "alexnet", "sample_parallel=off")
    assert plan.layout.sample_parallel == "on"
    assert plan.prediction is not None
    assert other.prediction is not None
    assert plan.prediction.step_time_s < 0.8 * other.prediction.step_time_s
    assert "sample_parallel" in dict(plan.reasons)
    by_hand = search(graph, node(bandwidth), BATCH, "alexnet", layout=plan.layout, shards=dict(plan.shards))
    assert by_hand.prediction is not None
    assert by_hand.prediction.step_time_s == pytest.approx(plan.prediction.step_time_s)


def test_it_may_span_nodes() -> None:
    """Ranks that talk in two layers only may be farther apart than those that talk in every one."""
    cluster = Cluster("nodes", GPU, (ClusterLevel("node", 8, NetworkLink(1e-6, 2e11)), ClusterLevel("network", 4, NetworkLink(2e-6, 5e10))))
    plan = search(alexnet(BATCH), cluster, BATCH, "alexnet")
    assert plan.layout.sample_parallel == "on"
    assert plan.layout.tensor > 8


def test_explain_says_where_each_layer_is() -> None:
    graph = alexnet(BATCH)
    found = {p.site: p for p in placement_rows(graph, propagate(graph, {"tensor": 8}, prices=PRICES, samples=True))}
    (conv,) = {(p.weights, p.output, p.backward) for site, p in found.items() if "conv2d" in site}
    assert conv == ("whole", "dim 0 by tensor", "")
    assert any("by tensor" in p.weights for site, p in found.items() if "linear" in site)


def test_it_is_searched_where_products_are_unlike() -> None:
    """In a transformer they are alike, and a search of twice as many bases would find nothing."""
    assert has_mixed_traffic(alexnet(BATCH), BATCH)
    assert not has_mixed_traffic(gpt(4, hidden=512, sequence=512, vocabulary=4096, batch=64), 64)
    for unlike in (False, True):
        bases = list(SearchSpace(node(1e10), 64, has_mixed_traffic=unlike).bases())
        assert any(f.sample_parallel == "on" for f in bases) is unlike
        assert all(64 // f.data % (f.microbatches * f.tensor) == 0 for f in bases if f.sample_parallel == "on")


def test_what_it_does_not_go_with_is_refused() -> None:
    with pytest.raises(LayoutError, match="tensor ranks that cut samples are in a line"):
        Layout.parse("tensor=2x2 sample_parallel=on")
    with pytest.raises(Infeasible, match="microbatches of 4 samples do not divide among tensor=8"):
        search(alexnet(64), node(1e10), 64, "alexnet", layout=replace(Layout(tensor=8, microbatches=16), sample_parallel="on"))
