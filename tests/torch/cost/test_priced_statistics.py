"""Statistics of batch norm that ranks exchange, as they are priced: by ranks that divide samples, not by those that divide channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.plan.ir.placement import Shard
from shardwise.plan.layout import Layout
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.zoo.resolve import resolve

BATCH = 16


@pytest.mark.parametrize(("layout", "exchanged"), [("data=1", False), ("data=2", True), ("tensor=2", False), ("data=2 tensor=2", True)])
def test_only_ranks_that_divide_samples_pay_for_statistics(layout: str, exchanged: bool) -> None:
    subject, sizes = resolve("resnet-18:image=32,classes=100", BATCH), Layout.parse(layout)
    graph = ModelSource.from_model(subject.make).capture(subject.batch(BATCH), subject.loss, BATCH).graph
    pricer = Pricer(graph, Cluster.parse("2xcpu-2"), BATCH)
    norms = [i for i, op in enumerate(graph.operators) if op.target.split(".")[1] == "batch_norm"]
    if sizes.tensor > 1:
        forms = pricer.sharding(sizes)
        assert forms is not None
        norms = [i for i in norms if forms.placements[graph.operators[i].outputs[0]].get("tensor") == Shard(1)]
    assert len(norms) >= 8
    _, _, forward, _ = pricer.operator_seconds(sizes)
    assert [bool(forward[i] > 0) for i in norms] == [exchanged] * len(norms)


def test_frozen_batch_norm_exchanges_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 36, 1))
    model[1].eval()
    graph = ModelSource.from_model(model).capture((torch.randn(8, 3, 8, 8),), lambda out, _: out.mean(), 8).graph
    _, _, forward, _ = Pricer(graph, Cluster.parse("1xcpu-2"), 8).operator_seconds(Layout.parse("data=2"))
    assert [float(s) for op, s in zip(graph.operators, forward, strict=True) if op.target.split(".")[1] == "batch_norm"] == [0.0]
