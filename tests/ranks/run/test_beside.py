"""What a loop uses beside a divided model's outputs, or makes of outputs that all ranks have alike, against one process.

Scales, prototypes and weights of losses are often parameters of the model that only the loop reads; a scale that the model returns is
multiplied with each rank's own scores.
"""

from __future__ import annotations

from collections.abc import Callable
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
from tests.support.plain_models import matches, said

LAYOUTS = [("data=2", 2), ("tensor=2", 2), ("data=2 tensor=2", 4)]
BATCH = 8
CUTS = (("up.weight", 0), ("up.bias", 0), ("down.weight", 1))  # columns, then rows


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.never = nn.Linear(6, 16), nn.Linear(16, 8), nn.Linear(2, 2)
        self.scale, self.bias = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(()))  # returned
        self.prototypes, self.weights = nn.Parameter(torch.eye(5, 8)), nn.Parameter(torch.zeros(2))  # read by the loop alone
        self.gain = nn.Parameter(torch.ones(8))  # both

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.down(torch.tanh(self.up(x)))
        return {"h": h * self.gain, "scale": self.scale.exp(), "bias": self.bias, "gain": self.gain.square()[None], "mean": h.mean(0)}


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(BATCH, 6, generator=generator).double(), torch.randint(5, (BATCH,), generator=generator)) for _ in range(3)]


def loss_of(net: Any, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    scores = out["scale"] * F.normalize(out["h"], dim=-1) @ F.normalize(net.prototypes, dim=-1).t()
    losses = torch.stack([F.cross_entropy(scores, y), (x[:, :1] * net.gain + x[:, 1:2] * out["gain"] + out["bias"]).square().mean()])
    total: Tensor = (torch.exp(-net.weights) * losses + net.weights).sum() + out["mean"].square().sum() + 0.1 * net.prototypes.norm()
    return total


def loop(net: Any, batches: Any) -> None:
    """Gradients add up over two backwards, and a hook lets some rows learn."""
    net.prototypes.register_hook(lambda grad: grad * torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])[:, None])
    opt = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)
    for x, y in batches:
        opt.zero_grad()
        for _ in range(2):
            loss_of(net, x, y).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()


def divided(world: World, layout: str, prepare: Callable[[nn.Module], object] = lambda net: None) -> nn.Module:
    sizes = Layout.parse(f"{layout} precision=float64")
    plan = Plan(sizes, "scored", "1xcpu-2", BATCH, shards=(("tensor", CUTS),) if sizes.tensor > 1 else ())
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=data()[0], plan=plan, world=world):
        net = Scored()
        prepare(net)
    assert isinstance(net, nn.Module)
    return net


def wrong(world: World, layout: str) -> list[str]:
    """Parameters that are not those of one process, in value or in having a gradient."""
    net = divided(world, layout)
    loop(net, shardwise.shard(data()))
    torch.manual_seed(7)
    serial = Scored().double()
    loop(serial, data())
    pairs = zip(net.named_parameters(), serial.parameters(), strict=True)
    return [name for (name, p), q in pairs if not matches(p.detach(), q.detach()) or (p.grad is None) != (q.grad is None)]


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_what_only_the_loop_reads_learns_as_on_one_process(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    assert ranks(wrong, num_ranks, layout) == [[]] * num_ranks


def thawed(world: World) -> str:
    net: Any = divided(world, "data=2", lambda net: net.up.requires_grad_(False))
    x, y = next(iter(shardwise.shard(data())))
    loss_of(net, x, y).backward()
    net.up.requires_grad_(True)
    return said(lambda: net(x), UsageError)


def test_what_was_frozen_when_it_was_divided_does_not_train_apart(ranks: Callable[..., list[Any]]) -> None:
    for text in ranks(thawed, 2):
        assert text.startswith("up.weight was frozen when the model was divided, and trains now")
        assert "freeze it after the block" in text
