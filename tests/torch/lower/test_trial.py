"""Trial of lowered operators without data: what fails on shards is found, and equal calls are tried once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import LayoutError
from shardwise.lower import trial
from shardwise.lower.trial import try_operators
from shardwise.model.graph import Graph
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import FREE_LINKS, Sharding
from shardwise.plan.layout import Layout
from shardwise.run.parts.runnable_sharding import shard_runnable
from shardwise.run.rank_model.model_source import ModelSource


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(6, 35)

    def forward(self, x: Tensor) -> Tensor:
        pi, mu, scale = self.f(x).split([5, 15, 15], -1)
        return (pi.log_softmax(-1) + (mu.view(-1, 5, 3) * scale.view(-1, 5, 3)).sum(-1)).logsumexp(-1).mean()


def _graph(make: type[nn.Module], *batch: Tensor) -> Graph:
    return ModelSource.from_model(make).capture(batch, None, None).graph


def _shard(graph: Graph) -> Sharding:
    return propagate(graph, {"tensor": 2}, prices=FREE_LINKS)


def test_a_reshape_of_features_cut_across_a_border_is_found_and_computed_whole() -> None:
    graph = _graph(_Mixture, torch.randn(8, 6))
    failure = try_operators(graph, _shard(graph), "float32").failure
    assert failure is not None
    assert failure.axes == ("tensor",)
    assert "view" in failure.op.site or "reshape" in failure.op.site

    def shard(labels: object) -> Sharding:
        return propagate(graph, {"tensor": 2}, prices=FREE_LINKS, labels=labels or None)  # type: ignore[arg-type]

    runnable = shard_runnable(graph, Layout(tensor=2), shard)
    assert try_operators(graph, runnable, "float32").failure is None
    assert any(label for by_axis in runnable.labels.values() for label in by_axis.values())  # the rest is still sharded


def test_what_cannot_be_computed_whole_is_refused_by_operator_key_and_remedy() -> None:
    graph = _graph(_Mixture, torch.randn(8, 6))
    with pytest.raises(LayoutError, match=r"(?s)view.*tensor=2.*leave tensor out"):
        shard_runnable(graph, Layout(tensor=2), lambda labels: _shard(graph))  # a broken twin: it ignores the labels


def test_a_wrong_output_shape_is_found() -> None:
    graph = _graph(_Mixture, torch.randn(8, 6))
    sharding = propagate(graph, {"data": 2})
    assert try_operators(graph, sharding, "float32").failure is None
    op = next(op for op in graph.operators if op.target.startswith("aten.logsumexp"))
    whole = {"data": sharding.placements[graph.loss]["data"]}
    wrong = replace(sharding, input_placements={**sharding.input_placements, op.name: (whole,)})  # the whole, where a shard is expected
    failure = try_operators(graph, wrong, "float32").failure
    assert failure is not None
    assert failure.op.name == op.name
    assert "follows from its shards" in failure.reason


class _Layers(nn.Module):
    def __init__(self, num: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
        return x.mean()


def test_equal_layers_and_ranks_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, calls = _graph(_Layers, torch.randn(16, 8)), []
    run = trial._OperatorTrial._run

    def counted(self: trial._OperatorTrial, *args: object) -> object:
        calls.append(args)
        return run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(trial._OperatorTrial, "_run", counted)
    assert try_operators(graph, propagate(graph, {"data": 16}), "float32").failure is None
    assert 0 < len(calls) <= 8  # 12 layers of 16 ranks have 4 different operators


class _ReadsDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        h = self.a(x)
        return torch.zeros(h.shape[0], 4, dtype=h.dtype).scatter_add(0, i[:, None].expand(-1, 4), h).float().square().mean()


def test_operands_of_several_dtypes_under_autocast_are_found() -> None:
    graph = _graph(_ReadsDtype, torch.randn(8, 6), torch.randint(8, (8,)))
    result = try_operators(graph, propagate(graph, {}), "bfloat16")
    assert result.failure is None
    assert len(result.promoted) == 1
    assert not try_operators(graph, propagate(graph, {}), "float32").promoted
