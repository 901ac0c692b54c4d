"""Does shardwise train a network that it has not seen? Convolutions, batch norm, token mixing, and a skip past several blocks.

shardwise verify examples/mixer.py:make --layout "data=2 pipeline=2 microbatches=2"
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS, PATCHES, CLASSES = 32, 16, 8  # C, P, V
Batch = tuple[Tensor, Tensor]


class Mixing(nn.Module):
    """Mix along the patches, then along the channels: B P C -> B P C."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_norm, self.channel_norm = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.patches = nn.Sequential(nn.Linear(PATCHES, 2 * PATCHES), nn.GELU(), nn.Linear(2 * PATCHES, PATCHES))
        self.channels = nn.Sequential(nn.Linear(CHANNELS, 4 * CHANNELS), nn.GELU(), nn.Linear(4 * CHANNELS, CHANNELS))

    def forward(self, x_BPC: Tensor) -> Tensor:
        x_BPC = x_BPC + self.patches(self.patch_norm(x_BPC).transpose(1, 2)).transpose(1, 2)
        return x_BPC + self.channels(self.channel_norm(x_BPC))


class Mixer(nn.Module):
    """Images of 8 x 8 in 3 colours, and their classes, to logits: B 3 8 8 -> B V."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.AvgPool2d(2))
        self.blocks = nn.ModuleList(Mixing() for _ in range(num_blocks))
        self.gate = nn.Parameter(torch.zeros(CHANNELS))
        self.norm = nn.LayerNorm(CHANNELS)
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        first_BPC = self.stem(pixels).flatten(2).transpose(1, 2)
        x_BPC = first_BPC
        for block in self.blocks:
            x_BPC = block(x_BPC)
        x_BPC = self.norm(x_BPC + torch.sigmoid(self.gate) * first_BPC)
        return self.head(x_BPC.mean(1))


def loss(logits_BV: Tensor, batch: Batch) -> Tensor:
    """Mean cross-entropy, with labels smoothed."""
    return F.cross_entropy(logits_BV, batch[1], label_smoothing=0.1)


def make() -> tuple[nn.Module, Batch, object]:
    """The module, the global batch that it is called with, by position, and the loss."""
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(16, 3, 8, 8, generator=generator), torch.randint(CLASSES, (16,), generator=generator))
    return Mixer(), batch, loss
