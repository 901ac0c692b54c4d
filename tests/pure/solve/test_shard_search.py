"""ZeRO inside nodes (`shard=N`): tried on leading layouts, priced by its links and memory, and taken where a constraint asks for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.network.network import RankGroup
from shardwise.cost.step import Pricer
from shardwise.errors import LayoutError
from shardwise.plan.layout import Layout
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

GRAPH = gpt(4, hidden=256, batch=8)
CLUSTER = Cluster.parse("4xdgx-h100")


def test_it_is_priced_by_the_links_of_each_group_and_by_the_memory_of_its_shards() -> None:
    pricer, layout = Pricer(GRAPH, CLUSTER, 32), Layout(data=32, zero=3, shard=8)
    (inside,) = pricer.stages(layout)
    (flat,) = pricer.stages(replace(layout, shard=0))
    sums = 4.0 * GRAPH.num_trainable
    beyond_s = pricer.collective("all_reduce", sums / 8, RankGroup(4, 8, 32))
    assert inside.gradients_s == pytest.approx(flat.gradients_s + beyond_s)
    assert inside.memory.alone.optimizer == pytest.approx(4 * flat.memory.alone.optimizer)
    assert inside.memory.alone.parameters == pytest.approx(4 * flat.memory.alone.parameters)


def test_a_constraint_is_met_and_leading_layouts_are_tried() -> None:
    plan = search(GRAPH, CLUSTER, 32, "gpt", constraints="shard=8 data=32 zero=3")
    assert (plan.layout.shard, plan.layout.zero) == (8, 3)
    tried = search(GRAPH, CLUSTER, 32, "gpt", constraints="data=32 zero=3")
    assert any(candidate.layout.shard == 8 for candidate in tried.candidates) or tried.layout.shard == 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data=4 zero=1 shard=3", "does not divide data=4"),
        ("data=4 zero=1 shard=1", "use zero=0, or shard=2"),
        ("data=4 zero=1 shard=2 expert=2", "expert=2 with shard=2"),
        ("data=4 zero=1 shard=2 compress=int8", "compress=int8 with shard=2"),
        ("data=4 zero=1 shard=2 all_reduce=ring", "all_reduce=ring with shard=2"),
        ("data=4 shard=2 staleness=1", "staleness=1 with shard=2"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(text)


def test_all_replicas_are_the_default() -> None:
    assert str(Layout.parse("data=4 zero=1 shard=4")) == "data=4 tensor=1 pipeline=1 zero=1"
