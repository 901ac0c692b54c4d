"""Models that exceed a device's limit serially train under it, each to the weights of the serial run without a limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import RankError
from shardwise.units import parse_bytes
from shardwise.world.world import World

pytestmark = pytest.mark.usefixtures("counting")
GPT, BATCH = "gpt-tiny:sequence=128", 8
WAYS = ("data=1 recompute=full", "data=1 offload=all", "pipeline=2 microbatches=4 schedule=gems-master")


@pytest.mark.parametrize(
    ("name", "batch", "limit"),
    [
        (GPT, BATCH, "20MiB"),  # 42 MiB in one process (float64); half of that is allowed
        ("resnet:blocks=6,bottleneck=false,base=32,image=64,classes=8", BATCH, "20MiB"),  # 26 MiB
    ],
)
def test_what_exceeds_the_limit_serially_trains_under_it(name: str, batch: int, limit: str) -> None:
    """With recomputation, offload, GEMS and by shardwise's choice, on one rank and on two, each against the serial run without a limit."""
    allowed = parse_bytes(limit)
    with pytest.raises(RankError, match=r"rank 0 holds .* of .* MiB .*activations .* needs .* more; use recompute=full"):
        shardwise.verify(name, "data=1", batch, device_memory=limit)
    words = "precision=float64 tensor=1"
    chosen = [
        shardwise.plan(name, batch, cluster="1xcpu-2", constraints=f"{words} {more}", device_memory=limit)
        for more in ("ranks=1 microbatches=1", "ranks=2")
    ]
    assert chosen[0].layout.recomputes_layers or chosen[0].layout.offloads_layers
    for way in (*WAYS, *chosen):
        found = shardwise.verify(name, way, batch, device_memory=limit)
        assert found.ok, (way, found)
        assert 0 < found.memory["total"] <= allowed


class Residual(nn.Module):
    """A small ResNet without batch norm's dependence on the microbatch, on images whose activations outweigh its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.relu(x + layer(x))
        return self.head(x.mean((2, 3))).square().mean()


def _loss(output: Tensor, batch: Any) -> Tensor:
    return output


def _trained(world: World, layout: str, limit: float) -> Any:
    batch = (torch.randn(8, 3, 48, 48, generator=torch.Generator().manual_seed(0)),)
    plan = shardwise.plan(Residual, batch, loss=_loss, cluster="1xcpu-2", layout=layout)
    engine = shardwise.parallelize(Residual, batch, loss=_loss, plan=plan, seed=0, world=world, device_memory=limit)
    for _ in range(2):
        engine.step(batch)
    return engine.full_state_dict(), engine.peak_memory_over_ranks()["total"]


def test_a_resnet_that_exceeds_the_limit_serially(ranks: Callable[..., list[Any]]) -> None:
    plain, peak = ranks(_trained, 1, "data=1 microbatches=4 precision=float64", 0)[0]
    whole, most = ranks(_trained, 1, "data=1 precision=float64", 0)[0]
    limit = 0.8 * most
    with pytest.raises(RankError, match="activations"):
        ranks(_trained, 1, "data=1 precision=float64", limit)
    for layout in ("recompute=full", "offload=activations", "pipeline=2 microbatches=4 schedule=gems-master"):
        serial = plain if "microbatches" in layout else whole
        num_ranks = 2 if "pipeline" in layout else 1
        state, held = ranks(_trained, num_ranks, f"{layout} precision=float64", limit)[0]
        assert held <= limit
        assert max(float((state[name] - serial[name]).abs().max()) for name in serial) < 1e-12
    assert peak < most
