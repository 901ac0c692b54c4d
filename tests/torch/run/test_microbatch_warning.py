"""A loss that compares samples is another one in microbatches: one warning where the engine is made, and an error by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import ModelError


class _Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = F.normalize(self.a(x), dim=-1) @ F.normalize(y, dim=-1).t()
        return F.cross_entropy(z, torch.arange(x.shape[0]))


class _Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        return F.cross_entropy(h + torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]), y)


def test_a_contrastive_loss_in_microbatches_gives_one_warning() -> None:
    batch = {"x": torch.randn(8, 6), "y": torch.randn(8, 4)}
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        shardwise.parallelize(_Contrastive, batch, plan="data=1", seed=0)
        assert not [w for w in given if "microbatches" in str(w.message)]
        shardwise.parallelize(_Contrastive, batch, plan="microbatches=2", seed=0)
    assert len([w for w in given if "microbatches change what is trained" in str(w.message)]) == 1


def test_edges_of_a_graph_in_microbatches_are_refused_by_name() -> None:
    batch = {"x": torch.randn(24, 6), "edges": torch.randint(12, 24, (2, 90)), "y": torch.randint(4, (24,))}
    with pytest.warns(RuntimeWarning, match="microbatches"):
        engine = shardwise.parallelize(_Graph, batch, plan="microbatches=2", seed=0)
    with pytest.raises(ModelError, match="microbatches=1"):
        engine.step(batch)
