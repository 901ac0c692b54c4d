"""Models for layers that are repeated together: many thin layers, and one whose third layer reads a buffer that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 16


class _Thin(nn.Module):
    """Keeps little beside what enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.product(x))


class _Counting(_Thin):
    """Divides by how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) / self.count


class _Layers(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x).mean(1)[:, 0], y)


def _batch() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 64, WIDTH, generator=made), "y": torch.randn(8, generator=made)}


def thin() -> Any:
    return _Layers([_Thin() for _ in range(12)]), _batch()


def writing() -> Any:
    return _Layers([_Counting() if i == 2 else _Thin() for i in range(5)]), _batch()
