"""A backward that an exception ends leaves nothing behind: the steps after it are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import ModelError
from shardwise.run.gradients.loop_reducer import LoopGradientReducer
from shardwise.world.world import World

X = torch.arange(48.0, dtype=torch.float64).view(8, 6) / 10


def interrupt(gradient: Tensor) -> None:
    raise KeyboardInterrupt


def train(layout: str | None) -> list[float]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    if layout is not None:
        net = shardwise.auto_parallelize(net, X, plan=f"{layout} precision=float64")
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for step in range(4):
        optimizer.zero_grad()
        x = X.clone().requires_grad_()
        if step == 1:
            x.register_hook(interrupt)  # called when parameters have their gradients
        loss = net(x).square().mean()
        losses.append(loss.item())
        try:
            loss.backward()
        except KeyboardInterrupt:
            continue
        optimizer.step()
    return losses


def both(world: World, layout: str) -> tuple[list[float], str]:
    right = train(layout)
    LoopGradientReducer.forget_interrupted_backward = lambda self: None  # type: ignore[method-assign]  # the broken twin
    try:
        return right, str(train(layout))
    except ModelError as error:
        return right, str(error)


@pytest.mark.parametrize("layout", ["data=2"])
def test_steps_after_an_interrupted_backward(ranks: Callable[..., list[Any]], layout: str) -> None:
    serial = train(None)
    for right, wrong in ranks(both, 2, layout):
        assert right == pytest.approx(serial, rel=1e-9)
        assert "arrives twice" in wrong
