"""Stages as neighbours: what is between nodes is priced so, and the planner turns a pipeline where that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.network.axes import stage_rank_distance
from shardwise.cost.network.network import send_s
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.timing import balanced_sites
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

GPU = Device("gpu", "gpu", (("float32", 1e13),), 1e11, 1e12, 1.0, 5e-6)
NODES = Cluster("nodes", GPU, (ClusterLevel("node", 4, NetworkLink(3e-6, 2e11)), ClusterLevel("cluster", 4, NetworkLink(1e-5, 1e9))))
LONG = replace(gpt(layers=8, hidden=64, heads=4, sequence=512, vocabulary=64))  # activations many times the weights


def step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@pytest.mark.parametrize(("pipeline", "far"), [(4, [1, 1, 1]), (8, [1, 1, 1, 4, 1, 1, 1])])
def test_borders_between_nodes_are_as_far_apart_as_nodes(pipeline: int, far: list[int]) -> None:
    layout = Layout(data=16 // pipeline, pipeline=pipeline, neighbours="pipeline")
    assert [stage_rank_distance(NODES, layout, s, s + 1) for s in range(pipeline - 1)] == far


@pytest.mark.parametrize("text", ["data=2 pipeline=8", "pipeline=16", "data=4 pipeline=4", "data=8 pipeline=2", "data=6 pipeline=2"])
def test_replicas_side_by_side_cross_where_ranks_lie_on_two_nodes(text: str) -> None:
    """Against every rank and where it lies; borders that are priced as if nodes had no end are not these."""
    layout = Layout.parse(text)
    stride = layout.stage_ranks
    for s in range(layout.pipeline - 1):
        crosses = any(r // 4 != (r + stride) // 4 for r in range(s * stride, (s + 1) * stride))
        assert stage_rank_distance(NODES, layout, s, s + 1) == (max(stride, 4) if crosses else stride)


def test_stages_of_half_a_node_hand_on_between_nodes_at_every_second_border() -> None:
    """2 MB a microbatch through a port of 1 GB/s: 2 ms, and through those of two devices of 200 GB/s 5 us."""
    pricer, layout = Pricer(LONG, NODES, 16), Layout(data=2, pipeline=8, microbatches=8)
    near, far = 3e-6 + 1e6 / 2e11, 1e-5 + 2e6 / 1e9
    assert [pricer.transfer_s(layout, 2e6, s, s + 1) for s in range(7)] == [pytest.approx(far if s % 2 else near) for s in range(7)]


def test_a_step_of_stages_in_a_node_has_its_borders_where_they_lie() -> None:
    """A node of all ranks has no border that is slow; stages at the ends of four nodes wait for theirs, each microbatch."""
    layout = Layout(data=2, pipeline=8, microbatches=8)
    one = replace(NODES, levels=(replace(NODES.levels[0], size=16),))
    slow, fast = (search(LONG, cluster, 16, "long", layout=layout) for cluster in (NODES, one))
    sent = Pricer(LONG, NODES, 16).transfer_s(layout, 2 * 512 * 64 * 4, 1, 2)
    assert step_s(slow) - step_s(fast) > 8 * sent


def test_what_crosses_nodes_is_priced_by_the_port_that_it_shares() -> None:
    pricer, layout = Pricer(LONG, NODES, 16), Layout(data=2, pipeline=8, microbatches=2, neighbours="pipeline")
    apart = [pricer.transfer_s(layout, 2e6, s, s + 1) for s in range(7)]
    assert apart == [pytest.approx(send_s(NODES, 1e6, 4 if s == 3 else 1, 1)) for s in range(7)]
    assert pricer.transfer_s(replace(layout, neighbours="branch"), 2e6) == send_s(NODES, 1e6, 2, 2)


def test_the_price_of_a_schedule_does_not_depend_on_what_was_priced_before() -> None:
    """zb-v has stages 7 and 8 on one rank, interleaved on the last and the first, of two nodes; each has 16 stages."""
    layout = Layout(data=2, pipeline=8, microbatches=4, neighbours="pipeline", schedule="zb-v")
    one, other = layout, replace(layout, schedule="interleaved", chunks=2)
    sites = balanced_sites(Pricer(LONG, NODES, 16), layout)

    def sends_s(pricer: Pricer, layout: Layout) -> list[float]:
        return [cost.collectives.total for cost in pricer.stages(layout, sites)]

    alone = [sends_s(Pricer(LONG, NODES, 16), each) for each in (one, other)]
    after = Pricer(LONG, NODES, 16)
    assert [sends_s(after, each) for each in (one, other)] == alone
    assert alone[0][7] < alone[1][7]


def test_the_planner_turns_a_pipeline_whose_activations_outweigh_its_weights() -> None:
    plan = search(LONG, NODES, 16, "long", "pipeline=4 data=4")
    assert plan.layout.neighbours == "pipeline"
    other = search(LONG, NODES, 16, "long", layout=replace(plan.layout, neighbours="branch"))
    assert step_s(plan) < 0.9 * step_s(other)
    assert dict(plan.reasons)["neighbours"].startswith("neighbours=pipeline: the best priced plan with neighbours=branch takes")
    # And not where weights are most of what moves.
    wide = search(gpt(layers=8, hidden=1024, heads=4, sequence=8, vocabulary=64), NODES, 16, "wide", "pipeline=4 data=4")
    assert wide.layout.neighbours == "branch"


def test_a_constraint_turns_all_pipelines() -> None:
    plan = search(LONG, NODES, 16, "long", "neighbours=pipeline pipeline=2")
    assert plan.layout.neighbours == "pipeline"
    assert search(LONG, NODES, 16, "long", "neighbours=branch pipeline=4 data=4").layout.neighbours == "branch"


def test_a_schedule_that_is_asked_for_is_not_left_out_for_what_1f1b_would_hold() -> None:
    """GEMS keeps activations of one microbatch, 1F1B those of as many as there are stages behind."""
    layout = Layout(pipeline=4, microbatches=4, schedule="gems-master")
    held = search(LONG, NODES, 16, "long", layout=layout).prediction
    other = search(LONG, NODES, 16, "long", layout=replace(layout, schedule="1f1b")).prediction
    assert held is not None
    assert other is not None
    few = replace(NODES, device=replace(GPU, memory_bytes=1.05 * held.memory.total))
    assert 1.3 * held.memory.total < other.memory.total
    same = "pipeline=4 data=1 microbatches=4 recompute=none offload=none zero=0"
    assert search(LONG, few, 16, "long", f"{same} schedule=gems-master").layout.schedule == "gems-master"
