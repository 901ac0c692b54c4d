"""Globals and closure variables that `forward` reads count when a loop changes them, as in the undivided model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.capture.global_reads import find_value_reads
from shardwise.run.loop import attribute_watch

TAU, FLAG, SETTINGS, unread, shape = 1.0, True, {"factor": 1.0}, 0, 3
X = torch.arange(24.0).view(4, 6) / 10


def scaled(x: Tensor) -> Tensor:
    return x * SETTINGS["factor"] if FLAG else x


def made() -> tuple[nn.Module, Callable[[float], None]]:
    level = 1.0

    def set_level(value: float) -> None:
        nonlocal level
        level = value

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return scaled(self.out(x)).reshape(len(x), -1) * float(level)

        def out(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.b(torch.tanh(self.a(x) / TAU))
            return hidden

    torch.manual_seed(0)
    return Net(), set_level


def losses(divided: bool) -> list[float]:
    names = globals()
    names.update(TAU=1.0, FLAG=True)
    SETTINGS["factor"] = 1.0
    net, set_level = made()
    if divided:
        net = shardwise.auto_parallelize(net, X, plan="data=1")
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: names.update(TAU=2.0),
        lambda: SETTINGS.update(factor=3.0),
        lambda: set_level(0.5),
        lambda: names.update(FLAG=False),
    ]
    optimizer, seen = torch.optim.SGD(net.parameters(), 0.1), []
    for change in changes:
        change()
        optimizer.zero_grad()
        loss = net(X).square().mean()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@pytest.mark.filterwarnings("ignore:the .* has had 4 values:RuntimeWarning")
def test_changed_globals_and_closures_count(monkeypatch: pytest.MonkeyPatch) -> None:
    serial = losses(divided=False)
    assert losses(divided=True) == pytest.approx(serial, rel=1e-6)
    monkeypatch.setattr(attribute_watch, "find_value_reads", lambda model: [])  # the broken twin
    assert losses(divided=True)[1] != pytest.approx(serial[1], rel=1e-2)


def test_only_values_that_are_read_are_watched() -> None:
    words = [read.words for read in find_value_reads(made()[0])]
    assert sorted(word.split(" of ")[0] for word in words) == [
        "the global FLAG",
        "the global SETTINGS",
        "the global TAU",
        "the variable level",
    ]
    assert unread + shape == 3  # `x.shape` is an attribute, not the global
