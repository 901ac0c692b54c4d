"""What a plain loop tells of replicas that are not equal: weights, gradients and inputs of one rank; one loop is not disturbed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import RunError, UsageError
from shardwise.run.gradients.parameter_hooks import register_on_gradient
from shardwise.run.gradients.replica_watch import INTERVAL, SWITCH
from shardwise.world.world import World


def train(world: World, layout: str, disturb: Callable[[nn.Module, int], Any], move: Callable[[Tensor], Tensor] = lambda x: x) -> list[str]:
    """Train `2 * INTERVAL` steps; return what was told, with the step of an error. `disturb`: called before each step on rank 1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
    net = shardwise.auto_parallelize(net, (torch.zeros(8, 6),), plan=layout, world=world)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(2 * INTERVAL)]
    step = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step, (x, y) in enumerate(shardwise.shard(data)):
                if world.rank == 1:
                    disturb(net, step)
                    x = x.copy_(move(x))
                optimizer.zero_grad()
                (net(x) - y).square().mean().backward()
                optimizer.step()
        except (RunError, UsageError) as error:
            return [f"{step} {type(error).__name__} {error}"]
    return [str(w.message) for w in caught]


def change_weight(net: nn.Module, step: int) -> None:
    if step == 3:
        with torch.no_grad():
            net[2].bias[1] += 1e-6  # type: ignore[index, operator]


def spoil_gradient(net: nn.Module, step: int) -> None:
    if step == 2:
        register_on_gradient(net[2].weight, lambda grad: grad * torch.nan)  # type: ignore[index]


def train_on_own_data(world: World, changed_at: int) -> int:
    """Return the call in which ranks that need the same batch were told that theirs differ; batches do not come from `shardwise.shard`."""
    torch.manual_seed(0)
    net = shardwise.auto_parallelize(nn.Linear(6, 64), (torch.zeros(8, 6),), plan="tensor=2", world=world)
    for step in range(INTERVAL):
        x = torch.full((8, 6), float(step + (step == changed_at and world.rank == 1)))
        try:
            net(x).sum().backward()
        except UsageError:
            return step
    return -1


def watch(world: World) -> list[list[str]]:
    assert train_on_own_data(world, 3) == 3
    assert train_on_own_data(world, -1) == -1
    told = [train(world, "data=2", nothing), train(world, "data=2", change_weight), train(world, "data=2", spoil_gradient)]
    told.append(train(world, "tensor=2", nothing, lambda x: x + 1.0))
    os.environ[SWITCH] = "off"
    try:
        return [*told, train(world, "data=2", change_weight), train(world, "data=2", spoil_gradient)]
    finally:
        del os.environ[SWITCH]


def nothing(net: nn.Module, step: int) -> None:
    pass


def test_tells_parameter_and_rank(ranks: Callable[..., list[Any]]) -> None:
    for rank, (clean, weight, gradient, inputs, *switched_off) in enumerate(ranks(watch, 2)):
        assert clean == []
        (text,) = weight
        assert text.startswith(f"{INTERVAL} ReplicasDiffer parameter 2.bias differs between ranks (ranks 0, 1)"), text
        origin = ["the gradient of 2.weight is infinite or not a number on rank 1"] if rank else []
        assert [text.partition(", before")[0] for text in gradient] == origin
        assert "those with the same samples need the same" in inputs[0], inputs
        assert switched_off == [[], []]
