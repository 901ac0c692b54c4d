"""The least that handing on between stages takes, against every choice of stages; and alike operators that are gathered once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_turned import NODES

from shardwise.cost.operators import build_inventory as gathering
from shardwise.cost.stages.base import stage_send_s
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.send_bounds import send_lower_bound_s
from shardwise.model.graph import Graph
from shardwise.plan.layout import Layout
from tests.support.gpt_graph import gpt
from tests.support.small_graphs import alexnet, experts

GRAPHS = {"gpt": gpt(3, hidden=64, batch=16), "alexnet": alexnet(16, image=32), "experts": experts(16, hidden=64, inner=256, count=2)}
LAYOUTS = ("data=2 pipeline=8", "data=4 pipeline=4", "pipeline=4", "data=8 pipeline=2", "data=4 pipeline=4 neighbours=pipeline")


def handed_on_s(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> float:
    """Seconds of one microbatch, both ways, of all that these stages send, by each link."""
    exposed = pricer.devices.exposed_send_fraction(layout)
    sends = [(stage.index, to, values) for stage in pricer.stages_at(sites) for to, values in stage.sends]
    return sum(2 * exposed * stage_send_s(pricer, layout, stage, to, values) for stage, to, values in sends)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("kind", GRAPHS)
def test_no_stages_hand_on_in_less(kind: str, text: str) -> None:
    pricer, layout, draw = Pricer(GRAPHS[kind], NODES, 16), replace(Layout.parse(text), microbatches=2), random.Random(0)
    if len(pricer.cuts) < layout.pipeline - 1:
        return
    tried = [sorted(draw.sample(pricer.cuts, layout.pipeline - 1), key=lambda cut: cut.index) for _ in range(50)]
    least = min(handed_on_s(pricer, layout, [cut.site for cut in some]) for some in tried)
    assert 0 <= send_lower_bound_s(pricer, layout) <= least * (1 + 1e-9)


def test_of_equal_layers_it_is_what_they_hand_on() -> None:
    """Stages that begin with layers hand on the residual alone, every second time between nodes; were all there, it would be more."""
    pricer, layout = Pricer(gpt(8, hidden=64, batch=16), NODES, 16), Layout(data=2, pipeline=8, microbatches=2)
    sent = handed_on_s(pricer, layout, pricer.even_stage_sites(layout))
    bound = send_lower_bound_s(pricer, layout)
    assert 0.7 * sent < bound <= sent  # what follows the embeddings is less
    far = 7 * 2 * pricer.transfer_s(layout, float(max(pricer.received_bytes_lower_bound(layout))), 1, 2)
    assert far > sent


@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}, {"data": 2, "tensor": 2, "sequence_parallel": "on"}])
@pytest.mark.parametrize(("graph", "folds"), [(gpt(12, hidden=64), True), (GRAPHS["alexnet"], False), (GRAPHS["experts"], False)])
def test_alike_operators_have_what_each_has_by_itself(
    graph: Graph, folds: bool, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(**sizes)  # type: ignore[arg-type]
    pricer, asked = Pricer(graph, NODES, 16), []
    of_each = gathering._InventoryBuilder.build_entry
    monkeypatch.setattr(gathering._InventoryBuilder, "build_entry", lambda *args: asked.append(args) or of_each(*args))
    once, few = pricer.sharded_inventory(layout), len(asked)
    monkeypatch.setattr(gathering.OperatorFacts, "placement_keys", lambda source, sharding: range(len(graph.operators)))
    each = gathering.build_sharded_inventory(pricer.operator_facts, pricer.sharding(layout))
    assert repr(once) == repr(each)
    assert len(asked) - few == len(graph.operators)
    assert not folds or few < len(graph.operators) / 2
