"""A divided model may be called with other tensors than it was divided with: `net(x)` and `net(x, targets)` train the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import Infeasible, ModelError
from shardwise.world.world import World


class Scored(nn.Module):
    """As nanoGPT's: scores, and their loss where there are targets."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        y = self.down(torch.relu(self.up(x)))
        return y if targets is None else (y, F.cross_entropy(y, targets))


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 6, generator=g, dtype=torch.float64), torch.randint(0, 4, (8,), generator=g)) for _ in range(4)]


def trained(net: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Losses of steps that call the model in different ways, and one of evaluation."""
    opt, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for i, (x, y) in enumerate(data):
        if i == 3:
            net.eval()
            with torch.no_grad():
                losses.append(float(net(x, y)[1]))
            break
        loss = F.cross_entropy(net(x), y) if i == 1 else net(x, targets=y)[1]
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def divided(world: World, layout: str) -> tuple[list[float], str]:
    torch.manual_seed(0)
    data = batches()
    net = shardwise.auto_parallelize(Scored().double(), data[0], plan=layout + " precision=float64", world=world)
    losses = trained(net, shardwise.shard(data))
    x, _ = next(iter(shardwise.shard(data)))
    net.up.train()  # modes in which it was not captured yet
    with pytest.raises(ModelError) as refused:
        net(x, x)  # the model itself refuses these targets
    return losses, str(refused.value)


@pytest.mark.parametrize("layout", ["data=2", "tensor=2"])
def test_every_way_of_calling_trains_the_same_weights(ranks: Callable[..., list[Any]], layout: str) -> None:
    torch.manual_seed(0)
    wanted = trained(Scored().double(), batches())
    found = ranks(divided, 2, layout)
    means = [sum(each) / 2 for each in zip(*(losses for losses, _ in found), strict=True)]
    assert means == pytest.approx(wanted, rel=1e-12)
    assert all("called with 0, 1" in said for _, said in found)


def unlike(world: World, layout: str, shared: bool) -> str:
    """A loader of each rank's own: batches of one length on all ranks are taken, of another on one rank refused, on all."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    net = shardwise.auto_parallelize(made, (torch.zeros(8, 5, 6),), plan=layout, world=world)
    own = 8 // int(layout[-1]) if layout.startswith("data") else 8
    for length in (5, 7):
        net(torch.ones(own, length, 6)).sum().backward()
    length = 9 if shared or world.rank == 0 else 4
    try:
        net(torch.ones(own, length, 6)).sum().backward()
    except Infeasible as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("layout", ["data=2", "tensor=2"])
def test_ranks_that_call_it_with_other_lengths_are_refused_together(ranks: Callable[..., list[Any]], layout: str) -> None:
    assert ranks(unlike, 2, layout, True) == ["taken"] * 2
    for said in ranks(unlike, 2, layout, False):
        assert "different shapes" in said


class Ranked(Scored):
    """A model that cannot be captured: what it computes depends on a value."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        y = super().forward(x, targets)
        return y if float(x.sum()) < 1e9 else None


def scaled(net: nn.Module, data: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Losses of steps that change in place what the model returned: of every sample, and their mean."""
    opt, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for x, y in data:
        scores, loss = net(x, y)
        scores.div_(2.0).add_(1.0)
        loss *= 0.5
        loss += scores.square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def written(world: World, layout: str, is_captured: bool, is_whole: bool) -> list[float]:
    torch.manual_seed(0)
    data = batches()
    model = (Scored if is_captured else Ranked)().double()
    net = shardwise.auto_parallelize(
        model, dict(zip(("x", "targets"), data[0], strict=True)), plan=layout + " precision=float64", world=world
    )
    return scaled(net, data if is_whole else shardwise.shard(data))


@pytest.mark.parametrize(
    ("layout", "is_captured", "is_whole"), [("data=2", True, True), ("data=2", False, False), ("tensor=2", True, True)]
)
def test_what_it_returns_may_be_changed_in_place(ranks: Callable[..., list[Any]], layout: str, is_captured: bool, is_whole: bool) -> None:
    torch.manual_seed(0)
    wanted = scaled(Scored().double(), batches())
    means = [sum(each) / 2 for each in zip(*ranks(written, 2, layout, is_captured, is_whole), strict=True)]
    assert means == pytest.approx(wanted, rel=1e-12)
