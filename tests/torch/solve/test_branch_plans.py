"""Plans that give branches to ranks: the network of four branches that SUPER was evaluated on, and what is chosen where."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.cluster.cluster import Cluster
from shardwise.model.stages.branches import find_regions
from shardwise.plan.plan import Plan
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.solve.axis_candidates import branch_rank_counts
from shardwise.zoo.resolve import resolve
from tests.support.towers import FourBranches

LASSEN = Path(__file__).parents[3] / "examples" / "clusters" / "lassen.toml"


def planned(layers: int, every_layer: bool, layout: str = "", constraints: str = "") -> Plan:
    """T5-Large's sizes, its heads and feed-forward layers in four branches; one sample of 512 positions a device."""
    with torch.device("meta"):
        batch = {name: torch.zeros(1024, 512, dtype=torch.long) for name in ("ids", "labels")}
    cluster = Cluster.parse(str(LASSEN))
    given = {"layout": layout} if layout else {"constraints": constraints}
    return shardwise.plan(lambda: FourBranches(layers, 1024, 16, 4096, 32128, every_layer), batch, cluster=cluster, **given)  # type: ignore[arg-type]


def seconds(plan: Plan) -> float:
    return plan.prediction.step_time_s


def test_four_branches_at_1024_v100() -> None:
    """SUPER: up to 3.05 times as fast as data parallelism, which all-reduces every branch's gradients over all devices."""
    data, near, far = (
        planned(6, False, f"{layout} precision=float16")
        for layout in ("data=1024", "data=256 branch=4", "data=256 branch=4 neighbours=data")
    )
    assert seconds(data) / seconds(near) > 1.05
    assert seconds(data) / seconds(far) > 1.4
    parts, theirs = dict(far.prediction.parts), dict(data.prediction.parts)
    assert theirs["gradients"] > 1.5 * parts["gradients"]
    assert far.prediction.memory.parameters < 0.6 * data.prediction.memory.parameters


def test_the_planner_gives_branches_to_ranks_where_it_pays() -> None:
    found = planned(4, False, constraints="tensor=1 pipeline=1 precision=float16")
    assert (found.layout.branch, found.layout.neighbours) == (4, "data")
    assert any(key == "branch" for key, _ in found.reasons)
    assert dict(found.shards)["branch"]


@pytest.mark.parametrize("name", ["gpt-tiny", "resnet-tiny"])
def test_no_branches_are_searched_where_they_are_little_of_the_model(name: str) -> None:
    model = resolve(name)
    graph = ModelSource.from_model(model.make).capture(model.batch(8), model.loss, 8).graph
    assert find_regions(graph)
    assert branch_rank_counts(graph, Cluster.parse("1xp3.16xlarge")) == ()
