"""When do branches of a model belong to different ranks? Four towers, each of a quarter of T5-Large's heads and features, as in sub-graph
parallelism (SUPER, Jain et al.): with `branch=4` each rank has one tower, so that only its gradients are summed.

    shardwise plan examples/towers.py:make --cluster examples/clusters/lassen.toml --batch 1024 --layout "LAYOUT precision=float16"

LAYOUT: `data=256 branch=4 neighbours=data`, or `data=1024` for data parallelism alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DIM, INNER, LAYERS, TOWERS = 1024, 4, 64, 1024, 24, 4  # of T5-Large 1,024, 16, 64, 4,096 and 24
POSITIONS, VOCABULARY = 512, 32_128


class Quarter(nn.Module):
    """A quarter of a transformer's layer: four of its heads, a quarter of its feed-forward features."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM, bias=False), nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, DIM).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.relu(self.up(self.between(x))))


class Towers(nn.Module):
    """Towers that read the same embeddings and whose outputs are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.towers = nn.ModuleList(nn.Sequential(*(Quarter() for _ in range(LAYERS))) for _ in range(TOWERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        outputs = [tower(x) for tower in self.towers]
        hidden = self.norm(torch.stack(outputs).sum(0))
        return F.cross_entropy(F.linear(hidden, self.embed.weight).flatten(0, 1), labels.flatten())


def make() -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and an example batch."""
    ids = torch.zeros(1024, POSITIONS, dtype=torch.long)
    return Towers(), {"ids": ids, "labels": ids}
