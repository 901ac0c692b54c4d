"""What the cases of `scripts/bench split` are made of: batches from text, and a chain of products for grids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from bench.case import Case

WIDTHS, ROWS = (256, 512, 256, 512, 256), 512
CLASSES = 16  # of an image, from the byte behind it


def batch_of(case: Case, tokens: Tensor) -> dict[str, Tensor]:
    """What the case's model is called with: text and what follows it; of a model of images, bytes as colours."""
    if not case.model.startswith("resnet"):
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    side = round((case.sequence // 3) ** 0.5)
    return {"pixels": tokens[:, :-1].reshape(-1, 3, side, side).float() / 64 - 1, "labels": tokens[:, -1] % CLASSES}


class Chain(nn.Module):
    """Products one after another."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def chain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The chain and its batch."""
    return Chain(), (torch.randn(ROWS, WIDTHS[0], generator=torch.Generator().manual_seed(3)),)
