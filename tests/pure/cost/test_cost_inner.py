"""What stages of different inner layouts cost: each as under its own layout, and what crosses between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.network.network import RankGroup
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import balanced_sites, link_times_s, price
from shardwise.errors import Infeasible
from shardwise.plan.layout import Layout
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

GPU = Device("gpu", "gpu", (("float32", 1e12), ("bfloat16", 4e12)), 1e11, 1e12, 1.0, 5e-6)
GPUS = Cluster("gpus", GPU, (ClusterLevel("node", 4, NetworkLink(3e-6, 2e11)), ClusterLevel("cluster", 2, NetworkLink(1e-5, 1e10))))


def test_each_stage_costs_what_it_costs_under_its_own_layout() -> None:
    pricer = Pricer(gpt(4), GPUS, 8)
    mixed = Layout.parse("pipeline=2 inner=4x1/2x2 microbatches=2")
    sites = balanced_sites(pricer, mixed)
    found = price(pricer, mixed, sites)
    for stage, text in enumerate(("data=4 pipeline=2 microbatches=2", "data=2 tensor=2 pipeline=2 microbatches=2")):
        own = Layout.parse(text)
        assert mixed.of_stage(stage) == own
        assert found.costs[stage] == pricer.stages(own, sites)[stage]


def test_what_crosses_costs_its_bytes_once_and_a_gather() -> None:
    """Towards the stage with tensor ranks it is gathered; a stage of the same kind takes what it takes without `inner`."""
    pricer = Pricer(gpt(4), GPUS, 8)
    mixed, plain = Layout.parse("pipeline=2 inner=4x1/2x2 microbatches=2"), Layout.parse("data=4 pipeline=2 microbatches=2")
    sites = balanced_sites(pricer, mixed)
    (taken,), (alone,) = (link_times_s(pricer, price(pricer, one, sites)).values() for one in (mixed, plain))
    there = mixed.of_stage(1)
    (values,) = (values for stage in pricer.stages_at(sites) for _, values in stage.sends)
    size = pricer.boundary_bytes(mixed, values)
    gathered = pricer.collective("all_gather", size / there.data, pricer.group(there, "tensor"))
    assert taken == pytest.approx(alone + gathered)


def test_a_plan_by_hand_is_priced_and_says_no_bound() -> None:
    plan = search(gpt(4), GPUS, 8, "gpt", layout=Layout.parse("pipeline=2 inner=4x1/2x2 microbatches=2"))
    assert plan.prediction is not None
    assert plan.prediction.step_time_s > 0
    assert plan.bound_gap is None
    assert dict(plan.shards)["tensor"], "the cuts of the stage that has tensor ranks"
    unequal, more = (
        search(gpt(4), GPUS, batch, "gpt", layout=Layout.parse("pipeline=2 inner=4x1/2x2 microbatches=3")).prediction for batch in (16, 24)
    )
    assert unequal is not None
    assert more is not None
    assert plan.prediction.step_time_s < unequal.step_time_s < more.step_time_s


THREE = replace(GPUS, levels=(ClusterLevel("node", 3, NetworkLink(3e-6, 2e11)),))
UNLIKE = Layout.parse("pipeline=2 inner=2x1/1x1 microbatches=2")


def test_a_stage_of_unlike_stages_costs_and_holds_what_as_many_replicas_do() -> None:
    """Against layouts whose stages all have as many ranks, and the same operators."""
    pricer = Pricer(gpt(4), THREE, 8)
    sites = balanced_sites(pricer, UNLIKE)
    found = price(pricer, UNLIKE, sites).costs
    for stage, text in enumerate(("data=2 pipeline=2 microbatches=2", "pipeline=2 microbatches=2")):
        alike = pricer.stages(Layout.parse(text), sites)[stage]
        assert found[stage].compute == alike.compute
        assert found[stage].memory == alike.memory
        assert (found[stage].gradients_s > 0) is (stage == 0), "the one with replicas sums gradients"


def test_what_crosses_between_unlike_stages_takes_as_long_as_the_lesser_takes() -> None:
    """All of it goes through the one rank's port, in one node and between nodes; tensor ranks then gather it."""
    pricer = Pricer(gpt(4), THREE, 8)
    for text, gathers in (("pipeline=2 inner=2x1/1x1", 0), ("pipeline=2 inner=1x1/1x2", 2)):
        layout = Layout.parse(f"{text} microbatches=2")
        sites = balanced_sites(pricer, layout)
        (values,) = (values for stage in pricer.stages_at(sites) for _, values in stage.sends)
        size = pricer.boundary_bytes(layout, values)
        gathered = pricer.collective("all_gather", size, RankGroup(2, 1, 3)) if gathers else 0.0
        (taken,) = link_times_s(pricer, price(pricer, layout, sites)).values()
        assert taken == pytest.approx(3e-6 + size / 2e11 + gathered)
    apart = Pricer(
        gpt(4),
        replace(GPUS, levels=(ClusterLevel("node", 1, NetworkLink(3e-6, 2e11)), ClusterLevel("cluster", 3, NetworkLink(1e-5, 1e10)))),
        8,
    )
    (taken,) = link_times_s(apart, price(apart, UNLIKE, sites)).values()
    assert taken == pytest.approx(1e-5 + apart.boundary_bytes(UNLIKE, values) / 1e10)


def test_unlike_stages_are_balanced_by_their_ranks() -> None:
    """Of alike layers the stage with two ranks takes about twice as many."""
    pricer = Pricer(gpt(12, hidden=256), replace(THREE, device=replace(GPU, launch_s=0.0)), 8)
    found = price(pricer, UNLIKE)
    two, one = found.costs
    assert two.compute.total == pytest.approx(one.compute.total, rel=0.15)
    first, second = (sum(op.site.endswith("/gelu") for op in stage.operators) for stage in pricer.stages_at(found.sites))
    assert first == pytest.approx(2 * second, abs=2)


def test_a_plan_of_unlike_stages_by_hand() -> None:
    plan = search(gpt(4), THREE, 8, "gpt", layout=UNLIKE)
    assert plan.layout.num_ranks == 3
    assert parse_plan(format_plan(plan)).layout == UNLIKE
    with pytest.raises(Infeasible, match="needs 5 devices, gpus has 3"):
        search(gpt(4), THREE, 8, "gpt", layout=Layout.parse("pipeline=2 inner=2x2/1x1 microbatches=2"))
