"""An engine's AdamW keeps the lists that its kernel takes: its updates are torch's own, bit for bit, whatever changes between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwise
from shardwise.run.state.inner_update import InnerUpdate
from shardwise.world import private_optimizers

OPTIONS: list[dict[str, Any]] = [{}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9), "maximize": True}, {"amsgrad": True}]


def _tensors(count: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3 + i) for i in range(count)]


Change = Callable[[Any], object]


def _train(update_of: Callable[[Any], Callable[[], object]], options: dict[str, Any], change: Change) -> list[torch.Tensor]:
    """Four steps, with a change after the second."""
    parameters, gradients = _tensors(3), _tensors(12)
    groups = [{"params": [p], "lr": 0.1} for p in parameters]
    optimizer = torch.optim.AdamW(groups, fused=True, **options)
    update = update_of(optimizer)
    for p, g in zip(parameters, gradients, strict=False):
        p.grad = g
    for number in range(4):
        if number == 2:
            change(optimizer)
        for p, g in zip(parameters, _tensors(12)[number:], strict=False):
            assert p.grad is not None
            p.grad.copy_(g[:1].expand_as(p))
        update()
    return parameters


def _change_rate(optimizer: Any) -> None:
    for entry in optimizer.param_groups:
        entry["lr"] = 0.01
    optimizer.param_groups[1]["weight_decay"] = 0.5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", [lambda optimizer: None, _change_rate], ids=["same", "other rate"])
def test_updates_are_torchs_bit_for_bit(options: dict[str, Any], change: Callable[[Any], object]) -> None:
    wanted = _train(lambda optimizer: optimizer.step, options, change)
    found = _train(lambda optimizer: InnerUpdate(optimizer).run, options, change)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[0], _tensors(1)[0])


def test_a_gradient_that_is_replaced_counts_once_the_update_is_unbound() -> None:
    """The broken twin, which is not told, goes on with the old one."""
    for is_told in (True, False):
        (p,) = _tensors(1)
        p.grad = torch.ones_like(p)
        update = InnerUpdate(torch.optim.AdamW([p], lr=0.1, fused=True, weight_decay=0.0))
        update.run()  # torch's own, which makes its state
        update.run()
        before = p.clone()
        p.grad = torch.full_like(p, -100.0)
        if is_told:
            update.unbind()
        update.run()
        assert bool((p > before).all()) == is_told


def test_hooks_that_change_gradients_are_called_and_seen() -> None:
    def double(optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, -100.0)

    found = []
    for step_of in (lambda optimizer: optimizer.step, lambda optimizer: InnerUpdate(optimizer).run):
        (p,) = _tensors(1)
        p.grad = torch.ones_like(p)
        step = step_of(torch.optim.AdamW([p], lr=0.1, fused=True))
        step()
        handle, calls = register_optimizer_step_pre_hook(double), list[int]()
        watch = register_optimizer_step_pre_hook(private_optimizers.observe_only(lambda *_, calls=calls: calls.append(1)))
        step()
        handle.remove()
        step()
        watch.remove()
        assert calls == [1, 1]
        found.append(p)
    assert torch.equal(*found)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


def test_a_loss_gradient_that_was_written_to_is_made_anew() -> None:
    batch = {"x": torch.ones(2, 3)}
    engine = shardwise.parallelize(Product, batch, plan="data=1", optimizer={"name": "sgd", "lr": 1.0})
    runner = engine.executor.runners[0]
    for is_written in (False, True, False):
        before, kept = engine.parameters["weight"].detach().clone(), runner._seed[0]
        if is_written and kept is not None:
            kept.mul_(7.0)
        engine.step(batch)
        assert torch.equal(engine.parameters["weight"].detach(), before - 2.0)
        assert (runner._seed[0] is kept) == (kept is not None and not is_written)


def test_backward_is_torchs_or_that_which_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": torch.ones(2, 3)}
    engine = shardwise.parallelize(Product, batch, plan="data=1")
    backward, calls = torch.autograd.backward, list[Any]()

    def record(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        backward(*args, **kwargs)

    engine.step(batch)
    monkeypatch.setattr(torch.autograd, "backward", record)
    before = engine.parameters["weight"].detach().clone()
    engine.step(batch)
    assert len(calls) == 1
    assert not torch.equal(engine.parameters["weight"].detach(), before)
