"""Evaluation under every kind of layout is the serial model's, also where the model computes otherwise than in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import shardwise
from shardwise.world.world import World

LAYOUTS = (
    "data=2", "tensor=2", "pipeline=2 microbatches=2", "data=2 zero=3", "data=2 zero=1 recompute=full",
    "pipeline=2 microbatches=2 schedule=zb-h1", "pipeline=2 microbatches=2 schedule=chimera",
)  # fmt: skip
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))


class Otherwise(nn.Module):
    """Drops attention, normalises by the batch, and takes another way, with fewer weights, when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.blocks, self.norm = nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block()), nn.BatchNorm1d(4)
        self.head, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.up(x)))
        if self.training:
            x = self.head(x) + 0.1 * self.aside(x)
        else:
            x = torch.tanh(self.head(x)) * 3 + 1
        return (x - y).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8, 4, WIDTH, generator=generator), torch.randn(8, 4, WIDTH, generator=generator)


def evaluated(world: World, layouts: tuple[str, ...]) -> list[tuple[list[float], dict[str, Tensor] | None]]:
    """For each layout: losses of two evaluations between two steps, one of them of fewer samples, and the state in the end."""
    x, y = batch()
    found = []
    for layout in layouts:
        engine = shardwise.parallelize(Otherwise, (x, y), plan=f"{layout} precision=float64", seed=1, world=world)
        engine.step((x, y))
        losses = [engine.evaluate((x, y))]
        state = engine.full_state_dict()
        engine.step((x, y))
        losses += [engine.evaluate((x, y)), engine.evaluate((x[:4], y[:4]), is_global_batch=True)]
        found.append((losses, state, engine.full_state_dict()))
    return found


def test_evaluation_is_a_capture_of_its_own(ranks: Callable[..., list[Any]]) -> None:
    of_ranks = ranks(evaluated, 2, LAYOUTS, timeout_s=200)
    x, y = (t.double() for t in batch())
    for layout, mine, others in zip(LAYOUTS, *of_ranks, strict=True):
        losses, before, after = mine
        assert losses == others[0], layout
        serial = Otherwise().double().eval()
        wanted = []
        for state, batches in ((before, [(x, y)]), (after, [(x, y), (x[:4], y[:4])])):
            serial.load_state_dict(state)
            with torch.no_grad():
                wanted += [float(serial(*given)) for given in batches]
        assert losses == pytest.approx(wanted, rel=1e-12), layout
