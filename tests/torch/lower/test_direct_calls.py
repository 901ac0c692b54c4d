"""Graphs whose code calls operators directly compute the same numbers, seen by the same modes, and find the same errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from shardwise.lower.direct_calls import call_operators_directly
from shardwise.world import private


class Halved(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.mul.Tensor(torch.ops.aten.tanh.default(x), 0.5)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.own = fx.symbolic_trace(Halved()), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = self.part(x)
        return torch.ops.aten.add.Tensor(self.own(h), y, alpha=2), torch.ops.aten.split.Tensor(h, 1, 0)


def _traced() -> fx.GraphModule:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    model = Nested()
    return fx.GraphModule(model, Tracer().trace(model))


def test_numbers_gradients_and_nested_graphs_are_the_same() -> None:
    module, x = _traced(), torch.randn(3, 2, requires_grad=True)
    wanted, pieces = module(x, x)
    (of_x,) = torch.autograd.grad(wanted.sum(), x)
    call = call_operators_directly(module)
    found, own_pieces = call(x, x)
    assert torch.equal(found, wanted)
    assert all(map(torch.equal, own_pieces, pieces))
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], of_x)
    assert call_operators_directly(module)(x, x)[0].equal(wanted)  # a second time changes nothing
    for part in (module, module.part):
        assert all("_op" not in name and not name.startswith("torch.ops") for name in type(part).forward.__code__.co_names)  # type: ignore[attr-defined]
        assert "ops" not in type(part).forward.__code__.co_names  # type: ignore[attr-defined]  # no look-up of four names


def test_modes_see_the_operators_and_a_recompiled_graph_runs_as_before() -> None:
    seen: list[str] = []

    class Watch(private.DispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    module, x = _traced(), torch.randn(2, 2)
    call = call_operators_directly(module)
    with Watch():  # type: ignore[no-untyped-call]
        call(x, x)
    assert {"aten.tanh.default", "aten.mul.Tensor", "aten.add.Tensor", "aten.split.Tensor"} <= set(seen)
    module.recompile()
    assert "ops" in type(module).forward.__code__.co_names  # type: ignore[attr-defined]
    assert torch.equal(module(x, x)[0], call(x, x)[0])


def test_a_module_with_hooks_or_code_of_its_own_is_called_as_it_is() -> None:
    module, own, calls = _traced(), Halved(), list[int]()
    module.register_forward_hook(lambda *_: calls.append(1))
    call_operators_directly(module)(torch.ones(2, 2), torch.ones(2, 2))
    assert calls == [1]
    assert call_operators_directly(own) is own


def test_an_error_of_an_operator_comes_through() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        call_operators_directly(_traced())(torch.ones(2, 2), torch.ones(3, 3))
