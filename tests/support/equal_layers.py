"""A model of equal layers, so that what one, two or all of them hold is easy to tell; its batch and its loss."""

from __future__ import annotations

from typing import Any

import torch

WIDTH, DEPTH = 16, 4
LAYER = WIDTH * WIDTH + WIDTH  # numbers of a layer's parameters


class Deep(torch.nn.Module):
    """`depth` linear layers of `width`, each with a tangent behind it."""

    def __init__(self, width: int = WIDTH, depth: int = DEPTH, bias: bool = True) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=bias) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def deep_batch(width: int = WIDTH) -> tuple[torch.Tensor]:
    """Eight samples, the same at every call."""
    return (torch.randn(8, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


def deep_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """The output, which is the loss."""
    return output
