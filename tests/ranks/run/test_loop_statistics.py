"""Running statistics that a loop reads, resets, assigns or averages over all batches, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

import shardwise
from shardwise.world.world import World

WAYS = ("plain", "cumulative", "update_bn", "swa", "reset", "assign")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 3, 6, 6, generator=generator).double(), torch.randint(0, 3, (8,), generator=generator)) for _ in range(3)]


def make_network(momentum: float | None) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = nn.BatchNorm2d(8, momentum=momentum), nn.BatchNorm2d(8, momentum=momentum)
    return nn.Sequential(nn.Conv2d(3, 8, 3), first, nn.ReLU(), nn.Conv2d(8, 8, 3), second, nn.Flatten(), nn.Linear(32, 3)).double()


def train(divide: Callable[[nn.Module], nn.Module], way: str) -> list[Tensor]:
    net = divide(make_network(None if way == "cumulative" else 0.1))
    norm = net[1]  # type: ignore[index]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train_epoch() -> None:
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    train_epoch()
    if way == "update_bn":
        update_bn([x for x, _ in batches()], net)
    elif way == "swa":
        average = AveragedModel(net)
        train_epoch()
        average.update_parameters(net)
        update_bn([x for x, _ in batches()], average)
        net = average.module
    elif way == "reset":
        norm.reset_running_stats()
    elif way == "assign":
        with torch.no_grad():
            norm.running_mean.zero_()
            norm.running_var.fill_(2.0)
            norm.num_batches_tracked.zero_()
    if way not in ("plain", "swa"):
        train_epoch()
    net.eval()
    with torch.no_grad():
        out = net(batches()[0][0])
    return [norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone(), out]


def compare_statistics(world: World, layout: str) -> list[str]:
    differences = []
    for way in WAYS:
        expected = train(lambda net: net, way)
        actual = train(
            lambda net: shardwise.auto_parallelize(net, (batches()[0][0],), plan=f"{layout} precision=float64", world=world), way
        )
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            if not torch.allclose(a, b, rtol=1e-9, atol=1e-11):
                differences.append(f"{way} {number}: {a.tolist()} instead of {b.tolist()}")
    return differences


@pytest.mark.parametrize(("layout", "num_ranks"), [("data=1", 1), ("data=2", 2), ("channel=2", 2)])
def test_equals_the_serial_run(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    assert ranks(compare_statistics, num_ranks, layout) == [[]] * num_ranks
