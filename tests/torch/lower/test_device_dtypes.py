"""Dtypes of values under a GPU's autocast, by torch's own autocast on tensors without data: no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from shardwise.capture.fakes import device_fake_mode
from shardwise.lower.device_dtypes import autocast_anywhere
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage, Lowering, lower
from shardwise.lower.torch_calls import call_in_operand_dtype
from shardwise.model.graph import Graph
from shardwise.model.sharding.propagate import propagate
from shardwise.model.stages.stages import split
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.run.residency.compiled_runs import compile_runs

GPU = torch.device("cuda")


class _Routed(nn.Module):
    """Norms, a softmax, a sum and a cumulative product between linear layers: what autocast on GPUs computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.before, self.after, self.groups = nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden + self.gate(self.before(hidden)).softmax(-1) * self.after(hidden)
        hidden = hidden / (1 + hidden.abs().sum(-1, keepdim=True)) + self.groups(hidden) + hidden.sigmoid().cumprod(-1)
        return F.cross_entropy(self.last(hidden), y)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return ModelSource.from_model(_Routed).capture({"x": torch.randn(4, 8), "y": torch.tensor([0, 1, 2, 3])}, None, 4).graph


def _lowered(graph: Graph, precision: str, device: torch.device) -> tuple[LocalStage, Lowering]:
    lowering = Lowering(graph, propagate(graph, {}), {}, device, DrawState(), precision=PRECISIONS[precision])
    return lower(split(graph, ())[0], lowering), lowering


class _Recording(fx.Interpreter):
    """Runs a lowered graph, and records the dtypes of what its calls return, in order."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.dtypes: list[torch.dtype] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor):
            self.dtypes.append(value.dtype)
        return value


def _run(local: LocalStage, lowering: Lowering, device: torch.device) -> list[torch.dtype]:
    """Return the dtypes in which a lowered graph computes on a device, of which only the dispatcher is there."""
    with device_fake_mode(), autocast_anywhere(device.type, torch.bfloat16):
        tensors = lowering.graph.tensors
        inputs = [torch.empty(tensors[v].shape, dtype=lowering.dtype(v), device=device) for v in local.variables]
        recording = _Recording(local.module)
        recording.run(*inputs)
    return recording.dtypes


def test_weights_held_in_16_bits_compute_on_a_gpu_as_on_processors(graph: Graph) -> None:
    found = [_run(*_lowered(graph, "bfloat16-mixed", device), device) for device in (torch.device("cpu"), GPU)]
    assert found[0] == found[1]
    assert found[0].count(torch.float32) == 1  # the loss


def test_broken_twin_of_operators_left_to_a_gpus_autocast(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lowering, "kept_operators", frozenset())
    assert _run(*_lowered(graph, "bfloat16-mixed", GPU), GPU).count(torch.float32) > 5


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-mixed", "float8"])
def test_values_have_the_dtypes_in_which_they_are_sent(graph: Graph, precision: str) -> None:
    """Values that are sent to other stages are of the dtype that the receiver expects, or narrower; most of 16-bit ones are not widened."""
    values = [v for op in graph.operators for v in op.outputs]
    local, lowering = _lowered(graph, precision, GPU)
    told, found = [lowering.dtype(v) for v in values], _run(local, lowering, GPU)
    assert len(told) == len(found)
    assert all(made.itemsize <= sent.itemsize for made, sent in zip(found, told, strict=True))
    assert told.count(torch.bfloat16) >= (3 if precision == "bfloat16" else len(told) - 3)


def test_operators_that_keep_their_dtype_do_not_divide_compiled_runs(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)  # torch's own switches off checks of distributions in this process
    local, _ = _lowered(graph, "bfloat16-mixed", GPU)
    assert any(node.target is call_in_operand_dtype for node in local.module.graph.nodes)  # type: ignore[union-attr]
    assert len(list(compile_runs(local.module).children())) == 1  # type: ignore[arg-type]


def test_unequal_operands_run_under_autocast() -> None:
    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert call_in_operand_dtype(torch.mul, x.bfloat16(), x).dtype == torch.float32
        assert call_in_operand_dtype(torch.mm, x, x.T).dtype == torch.float32
        assert call_in_operand_dtype(torch.mm, x.bfloat16(), x.T).dtype == torch.bfloat16
