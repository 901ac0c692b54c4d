"""Sparse tensors in a batch: refused by name by an engine, which divides rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import Infeasible


class _GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.b(torch.relu(torch.spmm(adjacency, self.a(x)))), y)


def test_a_sparse_adjacency_in_a_batch_is_refused_by_its_name() -> None:
    batch = {"x": torch.randn(12, 6), "adjacency": torch.eye(12).to_sparse_coo(), "y": torch.randint(3, (12,))}
    with pytest.raises(Infeasible, match=r"(?s)adjacency of the batch is a sparse tensor.*to_dense"):
        shardwise.parallelize(_GraphNet, batch, plan="data=1", seed=0)
