"""Clipping of gradients that are no numbers: as torch clips them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shardwise


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * self.a).sum() + (y * self.b).sum()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 5.0])
def test_one_bad_gradient_does_what_it_does_in_torch(bad: float) -> None:
    batch = {"x": torch.tensor([[1.0, bad, 2.0]]), "y": torch.ones(1, 2)}
    engine = shardwise.parallelize(Two, batch, plan="data=1", optimizer={"name": "sgd", "lr": 0.5, "clip": 1.0})
    engine.step(batch)
    serial = Two()
    serial(**batch).backward()
    nn.utils.clip_grad_norm_(serial.parameters(), 1.0)
    torch.optim.SGD(serial.parameters(), lr=0.5).step()
    for name, wanted in serial.named_parameters():
        torch.testing.assert_close(engine.parameters[name].detach(), wanted.detach(), rtol=0, atol=1e-6, equal_nan=True)
