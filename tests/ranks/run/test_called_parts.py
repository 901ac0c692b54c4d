"""A part of a divided model that is called by itself computes what it computes on one process, and learns so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.world.world import World

CUT = (
    ("encoder.0.weight", 0),
    ("encoder.0.bias", 0),
    ("encoder.1.weight", 0),
    ("encoder.1.bias", 0),
    ("encoder.3.weight", 1),
    ("decoder.weight", 0),
)


class Coder(nn.Module):
    """An encoder with batch norm and a decoder, which a script calls by themselves as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
        self.decoder = nn.Linear(4, 6, bias=False)

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.decoder(z))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encoder(x))


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(8, 6, generator=generator, dtype=torch.float64) for _ in range(3)]


def trained(net: Any, batches: Iterable[Tensor]) -> list[float]:
    """Losses of the model, of a step in which a part learns by itself, and what its parts give in evaluation."""
    opt, found = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5), []
    for x in batches:
        net.train()
        loss = F.mse_loss(net(x), x)
        loss.backward()
        z = x[:, :4] - 0.5
        alone = F.mse_loss(net.decode(z), x) + net.encoder[3](x.repeat(1, 2)[:, :8]).square().mean()
        alone.backward()
        opt.step()
        opt.zero_grad()
        found += [float(loss.detach()), float(alone.detach())]
        net.eval()
        with torch.no_grad():
            found.append(float(F.mse_loss(net.decode(net.encoder(x)), x)))
    return found


def plan_of(layout: str) -> Plan:
    sizes = Layout.parse(f"{layout} precision=float64")
    return Plan(sizes, "Coder", "1xcpu-2", 8, shards=(("tensor", CUT),) if sizes.tensor > 1 else ())


def divided(world: World, layout: str, is_whole: bool) -> tuple[list[float], float, float]:
    torch.manual_seed(0)
    net: Any = shardwise.auto_parallelize(Coder().double(), (data()[0],), plan=plan_of(layout), world=world)
    losses, x = trained(net, data() if is_whole else shardwise.shard(data())), data()[0]
    copied = copy.deepcopy(net)
    with torch.no_grad():
        return losses, float(copied.decode(copied.encoder(x)).sum()), float(net.decode(net.encoder(x)).sum())


@pytest.mark.parametrize(
    ("layout", "is_whole"),
    [("data=2", True), ("tensor=2", True), ("data=2 zero=3", True), ("data=2 zero=3", False), ("data=2 tensor=2 zero=3", True)],
)
def test_a_part_that_is_called_by_itself_learns_as_on_one_process(ranks: Callable[..., list[Any]], layout: str, is_whole: bool) -> None:
    torch.manual_seed(0)
    wanted = trained(Coder().double(), data())
    found = ranks(divided, 4 if "=2 tensor" in layout else 2, layout, is_whole)
    means = [sum(each) / len(found) for each in zip(*(losses for losses, *_ in found), strict=True)]
    assert means == pytest.approx(wanted, rel=1e-10)
    assert all(of_copy == of_model for _, of_copy, of_model in found)


def apart(world: World) -> str:
    net: Any = shardwise.auto_parallelize(Coder().double(), (data()[0],), plan="data=2 precision=float64", world=world)
    net.encoder(data()[0])
    with pytest.raises(UsageError) as refused:
        net.encoder(next(iter(shardwise.shard(data()))))
    return str(refused.value)


def test_batch_norm_of_a_part_takes_no_statistics_of_one_ranks_samples(ranks: Callable[..., list[Any]]) -> None:
    for said in ranks(apart, 2):
        assert "Sequential is called by itself and trains, with other samples on other ranks" in said


def images(world: World) -> tuple[float, str]:
    """How far a part with cut statistics is from one process in evaluation; what it says in training."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    net: Any = nn.Sequential(part, nn.Conv2d(8, 8, 3), nn.Flatten(1), nn.Linear(288, 4)).double()
    x, serial = torch.randn(4, 3, 8, 8, dtype=torch.float64), copy.deepcopy(net)
    net = shardwise.auto_parallelize(net, (x,), plan="tensor=2 precision=float64", world=world)
    assert net[0][1].running_mean.shape == (4,)
    for one in (net, serial):
        one(x)
        one.eval()
    far = float((net[0](x) - serial[0](x)).detach().abs().max())
    net.train()
    with pytest.raises(UsageError) as refused:
        net[0](x)
    assert net[0][0].weight.shape == (4, 3, 3, 3)
    return far, str(refused.value)


def test_a_part_with_cut_statistics_is_called_in_evaluation_alone(ranks: Callable[..., list[Any]]) -> None:
    for far, said in ranks(images, 2):
        assert far < 1e-12
        assert "Sequential is called by itself and trains, and its 1.running_mean lies in pieces on several ranks" in said
