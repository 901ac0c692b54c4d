"""How does shardwise train a model of mine? `make` returns the module, a batch and the loss; everything else is shardwise's.

shardwise plan examples/own_model.py:make --batch 16
shardwise verify examples/own_model.py:make --layout "data=2 tensor=2"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, HIDDEN, CLASSES = 32, 64, 10  # D, H, V


class Block(nn.Module):
    """A residual step of two layers: B D -> B D."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, FEATURES)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(F.gelu(self.up(self.norm(x_BD))))


class Classifier(nn.Module):
    """Some blocks and a head: B D -> B V."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(num_blocks)))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def loss(logits_BV: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy over the samples. The batch is what the module was called with, and what it needs beside."""
    return F.cross_entropy(logits_BV, batch["x"][:, :CLASSES].argmax(-1))


def make() -> tuple[nn.Module, dict[str, Tensor], object]:
    """The module, the global batch that it is called with (samples in dimension 0), and the loss."""
    return Classifier(), {"x": torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(0))}, loss
