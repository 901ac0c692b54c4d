"""A small model for plain loops that scripts change, its data, and how a divided run is compared with the serial one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.world.world import World

LAYOUTS = [("data=1", 1), ("data=2", 2), ("tensor=2", 2), ("data=2 zero=3", 2)]
CUT = (("up.weight", 0), ("up.bias", 0), ("down.weight", 1))
BATCH = 8
Divide = Callable[[nn.Module], nn.Module]
Case = Callable[[Divide], list[float]]  # trains a model that it makes itself, divided where it says, and returns losses


class Settings:
    """A plain object that a model reads."""

    def __init__(self) -> None:
        self.scale, self.switches = 1.0, {"double": False}


class Small(nn.Module):
    """A column-row pair that tensor parallelism cuts, a norm that it does not, and numbers that `forward` reads."""

    floor = 0.0  # of the class, until an object has one of its own

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.tau, self.settings, self.epoch = 1.0, Settings(), 0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.up(x)) / self.tau).clamp(min=self.floor - 1.0)
        y = self.down(y) * self.settings.scale
        return 2 * y if self.settings.switches["double"] else y


def data(steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(BATCH, 6, generator=g, dtype=torch.float64), torch.randint(0, 4, (BATCH,), generator=g)) for _ in range(steps)]


def make(kind: Callable[[], nn.Module] = Small) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(x), y)


def train(net: nn.Module, opt: Any, change: Callable[[nn.Module, int], None] = lambda net, i: None) -> list[float]:
    losses = []
    for i, (x, y) in enumerate(data()):
        change(net, i)
        loss = loss_of(net, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def divide(net: nn.Module, world: World, layout: str, cut: tuple[tuple[str, int], ...] = CUT) -> nn.Module:
    sizes = Layout.parse(f"{layout} precision=float64")
    plan: Any = Plan(sizes, "Small", "1xcpu-2", BATCH, shards=(("tensor", cut),)) if sizes.tensor > 1 and cut else str(sizes)
    return shardwise.auto_parallelize(net, data()[0][:1], plan=plan, world=world)


def found_in(
    world: World, cases: Iterable[str], table: Mapping[str, Case], layout: str, cut: tuple[tuple[str, int], ...]
) -> dict[str, Any]:
    """The losses of each case on this rank, or what it is refused with."""
    found: dict[str, Any] = {}
    for name in cases:
        try:
            found[name] = table[name](partial(divide, world=world, layout=layout, cut=cut))
        except ShardwiseError as error:
            found[name] = str(error)
    return found


def serial_of(table: Mapping[str, Case]) -> dict[str, list[float]]:
    return {name: case(lambda net: net) for name, case in table.items()}
