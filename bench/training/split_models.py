"""What the cases of `scripts/bench split` are made of: batches from text, and a chain of products for grids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.common.case import Case
from tests.support.chain import WIDTHS, Chain

ROWS = 512
CLASSES = 16  # of an image, from the byte behind it


def batch_of(case: Case, tokens: Tensor) -> dict[str, Tensor]:
    """What the case's model is called with: text and what follows it; of a model of images, bytes as colours."""
    if not case.model.startswith("resnet"):
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    side = round((case.sequence // 3) ** 0.5)
    return {"pixels": tokens[:, :-1].reshape(-1, 3, side, side).float() / 64 - 1, "labels": tokens[:, -1] % CLASSES}


def chain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The chain and its batch."""
    return Chain(), (torch.randn(ROWS, WIDTHS[0], generator=torch.Generator().manual_seed(3)),)
