"""What stages of different inner layouts cost: each as under its own layout, and what crosses between them."""

from __future__ import annotations

import pytest
from gpt_graph import gpt

from weft.cluster.cluster import Cluster, Device, Level, Link
from weft.cost.step import Pricer
from weft.plan.layout import Layout
from weft.solve.search import search
from weft.solve.timing import balanced, price, sends_s

GPU = Device("gpu", "gpu", (("float32", 1e12), ("bfloat16", 4e12)), 1e11, 1e12, 1.0, 5e-6)
GPUS = Cluster("gpus", GPU, (Level("node", 4, Link(3e-6, 2e11)), Level("cluster", 2, Link(1e-5, 1e10))))


def test_each_stage_costs_what_it_costs_under_its_own_layout() -> None:
    pricer = Pricer(gpt(4), GPUS, 8)
    mixed = Layout.parse("pipeline=2 inner=4x1/2x2 microbatches=2")
    sites = balanced(pricer, mixed)
    found = price(pricer, mixed, sites)
    for stage, text in enumerate(("data=4 pipeline=2 microbatches=2", "data=2 tensor=2 pipeline=2 microbatches=2")):
        own = Layout.parse(text)
        assert mixed.of_stage(stage) == own
        assert found.costs[stage] == pricer.stages(own, sites)[stage]


def test_what_crosses_costs_its_bytes_once_and_a_gather() -> None:
    """Towards the stage with tensor ranks it is gathered; a stage of the same kind takes what it takes without `inner`."""
    pricer = Pricer(gpt(4), GPUS, 8)
    mixed, plain = Layout.parse("pipeline=2 inner=4x1/2x2 microbatches=2"), Layout.parse("data=4 pipeline=2 microbatches=2")
    sites = balanced(pricer, mixed)
    (taken,), (alone,) = (sends_s(pricer, price(pricer, one, sites)).values() for one in (mixed, plain))
    there = mixed.of_stage(1)
    (values,) = (values for stage in pricer.split(sites) for _, values in stage.sends)
    size = pricer.crossing(mixed, values)
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
