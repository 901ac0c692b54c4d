"""Axes under which every rank would do the same are refused by name, and none under which something is divided."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from shardwise.errors import LayoutError
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import FREE_LINKS, refuse_idle_axes
from shardwise.run.rank_model.model_source import ModelSource


@pytest.mark.parametrize(
    ("widths", "sizes", "key"),
    [
        ((3, 3, 1), {"tensor": 4}, "tensor=4 "),
        ((1, 1, 1), {"data": 2, "tensor": 2}, "tensor=2 "),
        ((7, 3, 1), {"tensor": 4}, ""),  # the first product's inputs are cut
        ((7, 3, 1), {"data": 2, "tensor": 2}, ""),
        ((7, 3, 1), {"data": 4}, ""),
    ],
)
def test_an_axis_that_divides_nothing_is_refused(widths: tuple[int, int, int], sizes: Mapping[str, int], key: str) -> None:
    first, hidden, last = widths

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(first, hidden), nn.Tanh(), nn.Linear(hidden, last))

    graph = ModelSource.from_model(build).capture((torch.randn(8, first),), lambda out, *batch: out.mean(), None).graph
    sharding = propagate(graph, sizes, prices=FREE_LINKS)
    if not key:
        refuse_idle_axes(sharding, graph.parameter_shapes)
        assert sharding.shards.get("tensor") or "tensor" not in sizes
        return
    with pytest.raises(LayoutError, match=f"^{key}.*leave it out"):
        refuse_idle_axes(sharding, graph.parameter_shapes)
