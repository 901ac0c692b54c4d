"""What no model of the tests has: a place for it, so that breaking it shows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Scattered(nn.Module):
    """Pieces of an image in the places of a text that a mask names: in each sample as many as its number; fewer targets in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.see, self.head = nn.Embedding(9, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, image: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
        text, seen = self.words(ids), self.see(image)
        text = text.masked_scatter((ids == 0).unsqueeze(-1).expand_as(text), seen)
        classes = self.head(text)
        return F.cross_entropy(classes.flatten(0, 1), targets.flatten()) + F.nll_loss(classes.log_softmax(-1).transpose(1, 2), targets)


def scattered() -> Any:
    ids = 1 + (torch.arange(64).view(8, 8) * 5) % 8
    for sample in range(8):
        ids[sample, :sample] = 0
    image = torch.randn(8, 8, 3, generator=torch.Generator().manual_seed(0))
    return _Scattered(), {"image": image, "ids": ids, "targets": torch.where((ids > 0) & (ids < 5), -100, ids % 2)}
