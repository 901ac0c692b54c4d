"""Statistics of batch norm that ranks exchange, as they are priced: by ranks that divide samples, and by no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.cluster.cluster import Cluster
from weft.model.propagate import packet
from weft.plan.layout import Layout
from weft.run.build import Source
from weft.solve.mixed import pricer_of
from weft.solve.search import search


class Normed(nn.Module):
    """Channels that tensor ranks divide; one batch norm trains, the other is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.trains = nn.Conv2d(4, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.deep, self.frozen = nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.head = nn.Linear(64, 8)
        self.frozen.eval()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.trains(self.up(x)))
        h = torch.relu(self.frozen(self.deep(h)))
        scores: Tensor = self.head(h.mean((2, 3)))
        return scores.square().mean()


@pytest.mark.parametrize(("layout", "exchanged"), [("data=1", 0), ("data=2", 1), ("tensor=2", 0), ("data=2 tensor=2", 1)])
def test_only_ranks_that_divide_samples_pay_for_statistics(layout: str, exchanged: int) -> None:
    cluster = Cluster.parse("2xcpu-2")
    graph = Source.of(Normed).capture((torch.randn(8, 4, 16, 16),), None, 8).graph
    plan = search(graph, cluster, 8, "Normed", layout=Layout.parse(layout))
    forms = pricer_of(graph, cluster, 8, 2).sharding(plan.layout)
    if "tensor" in layout:
        assert forms is not None
        assert [forms.forms[op.outputs[0]].get("tensor") for op in graph.operators if packet(op) == "batch_norm"] == ["S1", "S1"]
    _, _, forward, backward = pricer_of(graph, cluster, 8, 2).operator_seconds(plan.layout)
    paid = [(f > 0, b > 0) for op, f, b in zip(graph.operators, forward, backward, strict=True) if packet(op) == "batch_norm"]
    # What a cut batch norm reads may be sliced or gathered backward; forward there are statistics alone.
    assert [f for f, _ in paid] == [exchanged > 0, False]
