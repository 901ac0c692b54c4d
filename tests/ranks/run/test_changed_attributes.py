"""What a loop changes of a divided model counts: numbers, flags, settings of layers and objects; and functions over its own layers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.world.world import World
from tests.support.loop_cases import CUT, LAYOUTS, Divide, Small, data, found_in, loss_of, make, serial_of, train


def set_class_number(net: Any, i: int) -> None:
    net.floor = 0.5 * (i % 2)  # its class has one, too


def switch(net: Any, i: int) -> None:
    net.settings.switches["double"] = i > 1


def set_scale(net: Any, i: int) -> None:
    net.settings.scale = 1.0 + (i % 2)


def freeze(net: Any, i: int) -> None:
    net.up.requires_grad_(i % 2 == 1)
    net.norm.train(i < 2)
    net.epoch = i  # read by nobody


def replace_data(net: Any, i: int) -> None:
    net.norm.weight.data = net.norm.weight.data * 0.5


CHANGES: dict[str, Callable[[Any, int], None]] = {
    "number": lambda net, i: setattr(net, "tau", (1.0, 0.5, 0.5, 2.0)[i]),
    "class": set_class_number,
    "momentum": lambda net, i: setattr(net.norm, "momentum", 0.9 if i else 0.1),
    "eps": lambda net, i: setattr(net.norm, "eps", 1e-5 * (1 + i // 2)),
    "object": set_scale,
    "dict": switch,
    "freeze": freeze,
    "data": replace_data,
}


def changed(name: str, divide: Divide) -> list[float]:
    net = make()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    net = divide(net)
    losses = train(net, opt, CHANGES[name])
    with torch.no_grad():
        losses.append(loss_of(net.eval(), *data()[0]).item())  # running statistics, too
    return losses


def with_layer_replaced(divide: Divide) -> list[float]:
    net: Any = divide(make())
    net.down = nn.Linear(16, 4).double()
    return train(net, torch.optim.SGD(net.parameters(), lr=0.2))


class Functions(nn.Module):
    """Nested closures, partial bound methods, lists of lambdas with defaults, functions over parameters; an argument with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        self.parts = nn.ModuleDict({"u": nn.Linear(6, 6), "v": nn.Linear(6, 4)})
        parts, weight = self.parts, self.c.weight

        def wrap(layer: nn.Module) -> Callable[[Tensor], Tensor]:
            return lambda x: torch.tanh(layer(x))

        inner = wrap(self.b)
        self.nested = lambda x: inner(parts["u"](x))
        self.partial = functools.partial(self.scaled, self.a, scale=0.5)
        self.steps = [lambda x, layer=layer: torch.relu(layer(x)) for layer in (self.a, self.c)]
        self.table = {"bound": parts["v"].forward, "weight": lambda x: x @ weight}
        self.weights = [self.b.weight, weight]

    def scaled(self, layer: nn.Module, x: Tensor, scale: float) -> Tensor:
        return layer(x) * scale

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        x = x + self.nested(x) + self.partial(x)
        for step in self.steps:
            x = x + step(x)
        y = self.table["bound"](x + self.table["weight"](x)) + 0.1 * torch.stack(self.weights).sum()
        return y if targets is None else (y, nn.functional.cross_entropy(y, targets))


def functions(divide: Divide) -> list[float]:
    net = make(Functions)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net, losses = divide(net), []
    for i, (x, y) in enumerate(data()):
        loss = net(x, y)[1] if i % 2 else nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


CASES: dict[str, Callable[[Divide], list[float]]] = {name: functools.partial(changed, name) for name in CHANGES}


def every(world: World, layout: str) -> dict[str, Any]:
    with warnings.catch_warnings(record=True):
        found = found_in(world, CASES, CASES, layout, CUT)
        found |= found_in(world, ["functions"], {"functions": functions}, layout, ())
    return found | found_in(world, ["replaced"], {"replaced": with_layer_replaced}, layout, CUT)


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_what_a_loop_changes_counts_as_in_one_process(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    wanted = serial_of(CASES | {"functions": functions})
    for found in ranks(every, num_ranks, layout):
        assert "down was replaced after the model was divided" in found.pop("replaced")
        assert found == {name: pytest.approx(losses, rel=1e-9) for name, losses in wanted.items()}


def capture_count(world: World) -> tuple[int, list[str]]:
    """Captures of a loop that sets a number that nobody reads and one that is read, and what it is told."""
    from shardwise.run.loop.module import sharded_module_of

    def case(divide: Divide) -> list[float]:
        net: Any = divide(make(Small))
        for i, (x, y) in enumerate(data(6)):
            net.epoch, net.tau = i, 1.0 + i // 3
            loss_of(net, x, y).backward()
        sharded: Any = sharded_module_of(net)
        counts.append(len(sharded.replica.captures.variants.entries))
        for i, (x, y) in enumerate(data(6)):
            net.tau = 3.0 + i
            loss_of(net, x, y).backward()
        return []

    counts: list[int] = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found_in(world, ["count"], {"count": case}, "data=1", ())
    return counts[0], [str(w.message) for w in told if "captured anew" in str(w.message)]


def test_only_what_is_read_is_captured_anew_and_often_is_told(ranks: Callable[..., list[Any]]) -> None:
    ((count, told),) = ranks(capture_count, 1)
    assert count == 1
    assert [said.split(" since")[0] for said in told] == ["tau has had 4 values"]
