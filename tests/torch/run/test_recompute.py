"""What recomputation repeats, what is then not kept, and that nothing else changes: dropout draws the same, gradients are the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

import shardwise
from shardwise.run.residency.recompute import RecomputedModule, find_core_attention

ROWS, HEADS, LENGTH = 4, 2, 24


class Attention(torch.nn.Module):
    """Two layers of attention with scores, as models write it; `router` is a softmax that is no attention."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block(dropout) for _ in range(2))
        self.router = torch.nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (self.router(x).softmax(-1) ** 2).mean()


class Block(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf"))
        weights = torch.nn.functional.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape))


def _engine(layout: str, model: Any, batch: Any, loss: Any = None) -> Any:
    return shardwise.parallelize(model, batch, loss=loss, plan=layout, seed=0, optimizer={"name": "sgd", "lr": 0.1})


def _module(engine: Any) -> fx.GraphModule:
    (runner,) = engine.executor.runners.values()
    return runner.local.module


def _kept(engine: Any, batch: Any) -> list[Tensor]:
    """What forward keeps for backward, outside of what is run again."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        engine.forward_backward(batch)
    return kept


@pytest.fixture
def batch() -> tuple[Tensor]:
    return (torch.randn(ROWS, LENGTH, 16, generator=torch.Generator().manual_seed(0)),)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_bit(batch: tuple[Tensor], dropout: float, recompute: str) -> None:
    found = []
    for one in ("none", recompute):
        engine = _engine(f"data=1 microbatches=2 recompute={one}", lambda: Attention(dropout), batch, lambda out, _: out)
        losses = [engine.step(batch).loss for _ in range(3)]
        found.append((losses, engine.full_state_dict()))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_selective_repeats_from_scores_to_what_reads_them(batch: tuple[Tensor]) -> None:
    plain = _engine("data=1", lambda: Attention(0.3), batch, lambda out, _: out)
    cores = find_core_attention(_module(plain).graph)
    assert len(cores) == 2
    for core in cores:
        names = [str(node.target) for node in core]
        assert "matmul" in names[0]
        assert "matmul" in names[-1]
        assert sum("softmax" in name for name in names) == 1
        assert not any("linear" in name for name in names)
    engine = _engine("data=1 recompute=selective", lambda: Attention(0.3), batch, lambda out, _: out)
    repeated = [m for m in _module(engine).modules() if isinstance(m, RecomputedModule)]
    assert len(repeated) == 2


def test_selective_keeps_no_scores(batch: tuple[Tensor]) -> None:
    """Korthikanti et al. 2022: what it does not keep are tensors of rows x heads x length x length, and only those."""
    scores = (ROWS, HEADS, LENGTH, LENGTH)
    kept = {}
    for one in ("none", "selective"):
        engine = _engine(f"data=1 recompute={one}", lambda: Attention(0.3), batch, lambda out, _: out)
        kept[one] = [tuple(x.shape) for x in _kept(engine, batch)]
    flat = (ROWS * HEADS, LENGTH, LENGTH)
    assert sum(shape in (scores, flat) for shape in kept["none"]) >= 2 * 2  # softmax, and what dropout leaves of it: a layer
    assert not any(shape in (scores, flat) for shape in kept["selective"])


def test_fused_attention_is_left_and_attention_with_dropout_is_not() -> None:
    for dropout, count in ((0.0, 0), (0.2, 2)):
        engine = shardwise.parallelize(f"gpt-tiny:dropout={dropout},layers=2", 4, plan="data=1 recompute=selective", seed=0)
        assert sum(isinstance(m, RecomputedModule) for m in _module(engine).modules()) == count
