"""Networks of parallel branches: quarters of a transformer layer beside one another."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Quarter(nn.Module):
    """A part of a transformer's layer: so many of its heads, so wide a part of its feed-forward layer."""

    def __init__(self, width: int, heads: int, dim: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * heads * dim, bias=False), nn.Linear(heads * dim, width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.relu(self.up(self.between(x))))


class FourBranches(nn.Module):
    """`every_layer`: branches are added up in each, else once, behind all layers. Embeddings are tied."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, vocabulary: int, every_layer: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.every_layer = nn.Embedding(vocabulary, width), nn.LayerNorm(width), every_layer
        quarters = [[Quarter(width, heads // 4, width // heads, inner // 4) for _ in range(4)] for _ in range(layers)]
        self.layers = nn.ModuleList(nn.ModuleList(row) for row in quarters)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.every_layer:
            for layer in self.layers:
                x = x + sum(branch(x) for branch in layer)
        else:
            towers = [x] * 4
            for layer in self.layers:
                towers = [branch(tower) for branch, tower in zip(layer, towers, strict=True)]
            x = towers[0] + towers[1] + towers[2] + towers[3]
        return F.cross_entropy(F.linear(self.norm(x), self.embed.weight).flatten(0, 1), labels.flatten())
