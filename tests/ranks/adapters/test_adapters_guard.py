"""torch's wrappers refuse a divided module; ranks that have the same samples must be called with the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from shardwise.world.world import World


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


class Outer(nn.Module):
    """A divided module inside, and what is not divided around it."""

    def __init__(self, world: World, layout: str) -> None:
        super().__init__()
        self.backbone = shardwise.auto_parallelize(small(), (torch.zeros(4, 4),), plan=layout, world=world)
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(x))


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    found = []
    for seed in seeds:
        loss = model(batch(seed)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def around(world: World, layout: str, folder: str) -> list[Any]:
    """Losses of two steps and of two more from a checkpoint; the optimizer's state dict."""
    model = Outer(world, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = trained(model, optimizer, range(2))
    shardwise.save(folder, model, optimizer, step=2)
    state, whole = shardwise.full_state_dict(optimizer), shardwise.full_state_dict(model)
    losses += trained(model, optimizer, range(2, 4))
    again = Outer(world, layout)
    optimizer = torch.optim.AdamW(again.parameters(), lr=0.01)
    shardwise.load(folder, again, optimizer)
    assert trained(again, optimizer, range(2, 4)) == losses[2:]
    return [losses, state, whole]


@pytest.mark.parametrize("layout", ["data=2", "tensor=2", "data=2 zero=1"])
def test_a_divided_module_inside_another(ranks: Callable[..., list[Any]], tmp_path: Any, layout: str) -> None:
    model = nn.ModuleDict({"backbone": small(), "head": nn.Linear(4, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    wanted = trained(nn.Sequential(*model.values()), optimizer, range(2))
    state, weights = copy.deepcopy(optimizer.state_dict()), {name: x.clone() for name, x in model.state_dict().items()}
    wanted += trained(nn.Sequential(*model.values()), optimizer, range(2, 4))
    (losses, theirs, whole), (_, nothing, none) = ranks(around, 2, layout, str(tmp_path))
    assert nothing is none is None
    assert losses == pytest.approx(wanted, rel=1e-6)
    assert theirs["param_groups"] == state["param_groups"]
    assert whole.keys() == weights.keys()
    for name, x in weights.items():
        torch.testing.assert_close(whole[name], x)
    for place, slots in state["state"].items():
        for slot, x in slots.items():
            torch.testing.assert_close(theirs["state"][place][slot], x)


def wrapped(world: World, name: str) -> str:
    model = shardwise.auto_parallelize(small(), (torch.zeros(4, 4),), plan="tensor=2", world=world)
    with pytest.raises(UsageError) as told:
        getattr(nn.parallel, name)(nn.Sequential(model))
    return str(told.value)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "DataParallel"])
def test_wrappers_refuse_a_divided_model(ranks: Callable[..., list[Any]], name: str) -> None:
    assert all(f"{name} is given Sequential" in told and "shardwise.adapters" in told for told in ranks(wrapped, 2, name))


def different(world: World, layout: str, whole: bool) -> str:
    from shardwise.run.loop.module import sharded_module_of

    model = shardwise.auto_parallelize(small(), (torch.zeros(4, 4),), plan=layout, world=world)
    divided = sharded_module_of(model)
    assert divided is not None
    if whole:
        divided.expect_full_batches()
    with pytest.raises(UsageError) as told:
        model(batch(world.rank))
    return str(told.value)


@pytest.mark.parametrize(("layout", "whole"), [("tensor=2", False), ("data=2", True)])
def test_ranks_with_the_same_samples_are_called_with_the_same(ranks: Callable[..., list[Any]], layout: str, whole: bool) -> None:
    for told in ranks(different, 2, layout, whole):
        assert "different batches" in told


class Counted(nn.Module):
    """A loss that is a sum over samples, divided by a number that is given: tokens of all batches that a step has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().sum() / count


def counted(world: World) -> list[float]:
    torch.manual_seed(0)
    model, x, count = Counted(), batch(1), torch.tensor(7.0)
    wanted = float(model(x, count))
    shardwise.auto_parallelize(model, {"x": x, "count": count}, plan="data=2", world=world)
    with torch.no_grad():
        return [wanted, float(model(x, count))]


def test_a_sum_of_the_batch_that_every_rank_has_is_counted_once(ranks: Callable[..., list[Any]]) -> None:
    """Without gradients, where ranks need not tell each other anything, it was counted once for each rank."""
    for wanted, ours in ranks(counted, 2):
        assert ours == pytest.approx(wanted, rel=1e-6)
