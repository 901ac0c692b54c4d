"""Scripts that seed nothing: ranks begin with random numbers, and so weights, of their own, unless rank 0's are everyone's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.world.world import World
from tests.support.plain_models import said

BATCH = (torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 32).view(8, 4))


def unseeded(world: World) -> dict[str, Any]:
    """What ranks that were seeded unlike hold and draw."""
    torch.manual_seed(100 + world.rank)
    with shardwise.auto_parallelize(batch=BATCH, plan="data=2", world=world):
        net = nn.Linear(4, 4)
    found: dict[str, Any] = {"block": net.weight.detach().clone(), "drawn after it": torch.rand(4)}
    torch.manual_seed(100 + world.rank)
    engine = shardwise.parallelize(lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), BATCH, loss=_loss, plan="data=2", world=world)
    found["engine"] = engine.parameters["0.weight"].detach().clone()
    torch.manual_seed(100 + world.rank)
    built = nn.Linear(4, 4)
    found["built"] = said(lambda: shardwise.auto_parallelize(built, BATCH, plan="data=2", world=world), UsageError)
    found["given"] = said(lambda: shardwise.parallelize(built, BATCH, loss=_loss, plan="data=2", world=world), UsageError)
    torch.manual_seed(0)
    net = shardwise.auto_parallelize(nn.Linear(4, 4), BATCH, plan="data=2", world=world)
    for x, y in shardwise.shard([BATCH]):
        nn.functional.mse_loss(net(x), y).backward()
    found["gradient"] = net.weight.grad
    found["data"] = said(lambda: list(shardwise.shard([(torch.rand(8, 4) + world.rank, BATCH[1])])), UsageError)
    return found


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(output, batch[1])


def test_ranks_that_seed_nothing_begin_alike(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(unseeded, 2)
    for key in ("block", "drawn after it", "engine"):
        assert torch.equal(first[key], second[key]), key
    torch.manual_seed(100)
    assert torch.equal(first["block"], nn.Linear(4, 4).weight)
    assert first["data"] == ""  # rank 0's are what the others' are held against
    for key in ("built", "given"):
        assert first[key].startswith("the model of another rank has other values than rank 0's"), first[key]
        assert second[key].startswith("weight of rank 1's model has other values than rank 0's"), second[key]
        assert "torch.manual_seed(0)" in second[key]
    assert second["data"].startswith("rank 1 is given another batch than rank 0")
    assert "torch.manual_seed(0)" in second["data"]
    torch.manual_seed(0)
    serial = nn.Linear(4, 4)
    nn.functional.mse_loss(serial(BATCH[0]), BATCH[1]).backward()
    for found in (first, second):
        assert torch.allclose(found["gradient"], serial.weight.grad, atol=1e-6)
