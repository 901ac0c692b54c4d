"""What linear layers behind a gather do in backward: what they compute, in which order, and gradients of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.lower.column_linears import ColumnCut, apply_column_linears
from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.placement import D, shard

linear = torch.ops.aten.linear.default
ORDER = ["gather", "product", "product", "scatter", "gathered", "product", "product", "scattered"]


class Work:
    """A collective that says when it is waited for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait(self) -> None:
        self.events.append(self.name)


class Twins:
    """A group of two ranks of which the other one has all that this one has."""

    size, index, fused_name = 2, 0, ""

    def __init__(self) -> None:
        self.events: list[str] = []

    def all_gather(self, x: Tensor, dim: int, lengths: Any = None) -> Tensor:
        return torch.cat([x, x], dim)

    def reduce_scatter(self, x: Tensor, dim: int, lengths: Any = ()) -> Tensor:
        return 2 * x.chunk(2, dim)[0].contiguous()

    def all_gather_into(self, out: Tensor, x: Tensor, wait: bool) -> Work:
        self.events.append("gather")
        out.copy_(torch.cat([x, x]))
        return Work("gathered", self.events)

    def reduce_scatter_into(self, out: Tensor, x: Tensor, wait: bool) -> Work:
        self.events.append("scatter")
        out.copy_(2 * x[: out.numel()])
        return Work("scattered", self.events)


class AtOnce(Twins):
    """The broken twin: it waits where it starts."""

    def all_gather_into(self, out: Tensor, x: Tensor, wait: bool) -> Work:
        work = super().all_gather_into(out, x, wait)
        work.wait()
        return Work("", [])


class Products(TorchDispatchMode):
    """Writes down matrix products."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.mm.default:
            self.events.append("product")
        return function(*args, **(kwargs or {}))


def _operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 4), (5, 4), (5,), (6, 4))
    x, weight, bias, other = (torch.randn(s, generator=made, dtype=torch.float64).requires_grad_() for s in shapes)
    return x, weight, bias, other


def _fused(group: Any, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    one, two = apply_column_linears(ColumnCut(shard(1, 6, 2), group), (linear, linear), x, weight, bias, other, None)
    return one.sin().sum() + two.cos().sum()


def _apart(group: Any, x: Tensor, weight: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    whole = redistribute(x, shard(1, 6, 2), D, group)
    return linear(whole, weight, bias).sin().sum() + linear(whole, other, None).cos().sum()


def _gradients(run: Callable[..., Tensor], *, again: bool = False) -> list[Tensor]:
    operands = _operands()
    found = torch.autograd.grad(run(Twins(), *operands), operands, create_graph=again)
    if not again:
        return list(found)
    return list(torch.autograd.grad(sum((g.square().sum() for g in found), torch.zeros(())), operands))


@pytest.mark.parametrize("again", [False, True])
def test_gradients_and_theirs_are_those_of_the_parts(again: bool) -> None:
    for a, b in zip(_gradients(_fused, again=again), _gradients(_apart, again=again), strict=True):
        assert torch.allclose(a, b, rtol=1e-14, atol=1e-14)


def _events(group: Twins) -> list[str]:
    loss = _fused(group, *_operands())
    group.events.clear()
    with Products(group.events):
        loss.backward()
    return group.events


def test_collectives_run_beside_products() -> None:
    assert _events(Twins()) == ORDER


def test_a_twin_that_waits_where_it_starts_is_found() -> None:
    assert _events(AtOnce()) != ORDER


def test_what_is_frozen_is_neither_gathered_for_nor_computed() -> None:
    group = Twins()
    x, weight, bias, other = _operands()
    loss = _fused(group, x, weight.detach(), bias.detach(), other.detach())
    group.events.clear()
    with Products(group.events):
        loss.backward()
    assert group.events == ["product", "product", "scatter", "scattered"]
