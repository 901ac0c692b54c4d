"""Proofs of attention whose heads lie in runs: two halves of the heads, of which one is subtracted from the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.run.prove.proof import Proof

WIDTH, HEADS = 4, 4


class Differential(nn.Module):
    """Attention of fewer heads of keys than of queries; half of its heads less the other half (Ye et al. 2024)."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.query, self.out = nn.Linear(8, HEADS * WIDTH), nn.Linear(HEADS // 2 * WIDTH, 8)
        self.key, self.value = nn.Linear(8, key_heads * WIDTH), nn.Linear(8, key_heads * WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        samples, length, _ = x.shape
        query, key, value = (f(x).view(samples, length, -1, WIDTH).transpose(1, 2) for f in (self.query, self.key, self.value))
        key, value = (t.repeat_interleave(HEADS // self.key_heads, 1) for t in (key, value))
        first, second = functional.scaled_dot_product_attention(query, key, value, is_causal=True).chunk(2, 1)
        return functional.mse_loss(self.out((first - second / 2).transpose(1, 2).flatten(2)), y)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_each_rank_has_heads_of_each_run(key_heads: int) -> None:
    batch = (torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    proof = shardwise.prove(lambda: Differential(key_heads), "tensor=2", batch, max_error_probability=0.1)
    assert isinstance(proof, Proof)
    assert proof.ok, proof
