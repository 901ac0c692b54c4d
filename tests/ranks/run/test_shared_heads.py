"""Attention whose keys have fewer heads than there are tensor ranks: queries are cut, each rank picks the keys that its queries read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import RankError
from shardwise.lower import operator_lowering
from shardwise.run.verify.verify import Verification

WIDTH = 8  # of a head


class Attention(nn.Module):
    """Causal attention of `heads` over `keys` heads of keys and values, as Llama has it (eight of 32), or Falcon (one)."""

    def __init__(self, heads: int, keys: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.keys, self.dropout = heads, keys, dropout
        self.q, self.out = nn.Linear(16, heads * WIDTH), nn.Linear(heads * WIDTH, 16)
        self.k, self.v = nn.Linear(16, keys * WIDTH), nn.Linear(16, keys * WIDTH)

    def forward(self, x_BSD: Tensor) -> Tensor:
        q, k, v = (f(x_BSD).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def verified(heads: int, keys: int, layout: str, dropout: float = 0.0, **options: Any) -> Verification:
    batch = (torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0)),)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output - 1).square().mean()

    def make() -> nn.Module:
        return nn.Sequential(Attention(heads, keys, dropout), Attention(heads, keys, dropout))

    return shardwise.verify(make, layout, batch, loss=loss, cut_everything=True, **options)


@pytest.mark.parametrize(
    ("heads", "keys", "layout"),
    [
        (4, 1, "tensor=2"),
        (4, 1, "tensor=4"),
        (8, 2, "tensor=4"),
        (6, 3, "tensor=4"),
        (6, 2, "tensor=3"),
        (8, 2, "data=2 tensor=4 zero=1"),
        (8, 2, "pipeline=2 tensor=4 microbatches=2 schedule=zb-h1"),
        (8, 2, "tensor=4x2"),
    ],
)
def test_queries_are_cut_where_keys_are_fewer_than_ranks(heads: int, keys: int, layout: str) -> None:
    found = verified(heads, keys, layout)
    assert found.ok, found
    assert found.tolerance == 1e-9
    if "x" not in layout:
        assert found.divided["tensor"]["flops"] > (0.5 if heads == 6 else 0.7), found.divided


def test_broken_twin_the_first_keys_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    right = operator_lowering.shared_heads

    def first(x: Tensor, first: int, count: int, of: int) -> Tensor:
        return right(x, 0, count, of)

    monkeypatch.setattr(operator_lowering, "shared_heads", first)
    assert not verified(8, 2, "tensor=4").ok
    monkeypatch.setattr(operator_lowering, "_select_shared_heads", lambda call: None)
    with pytest.raises(RankError):
        verified(6, 3, "tensor=4")
