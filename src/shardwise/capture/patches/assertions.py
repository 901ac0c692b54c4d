"""Value checks by torch's own functions: `torch._check(n <= limit)`, "as many image tokens as features".

Torch: a trace has these checks, and its own assumptions on data-dependent numbers, as operators.
Wanted: no such operators, no numbers that only they read, nor unused tensors of data-dependent shape. A check guards the user's data, the
    same in every layout; a run does not repeat it. A shape that a check determines is refused as data-dependent.
Test: tests/torch/model/test_checks.py::test_checks_are_no_operators
Until: not known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.capture.fakes import TORCH_ASSERT
from shardwise.capture.patches.patch import Patch

_CHECKS = (
    "aten._assert_scalar.default",
    "aten._assert_async.msg",
    "aten._assert_async.default",
    "aten._assert_tensor_metadata.default",
    "aten.sym_constrain_range.default",
    "aten.sym_constrain_range_for_size.default",
)
_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def without_assertions(module: torch.fx.GraphModule) -> None:
    """Erase assertions, and unused numbers and tensors of data-dependent shape, in place."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users and (str(node.target) in _CHECKS or _is_number(node) or _is_data_dependent(node)):
            module.graph.erase_node(node)
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):
            without_assertions(child)


def _is_number(node: Any) -> bool:
    """Return whether a node computes a number or a symbol, which nothing can write to."""
    return isinstance(node.meta.get("val"), _NUMBERS)


def _is_data_dependent(node: Any) -> bool:
    """Return whether a node makes a tensor of data-dependent shape."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(not isinstance(n, int) for n in value.shape)


def _assert_unless_traced(condition: Any, message: str) -> None:
    """Replace `torch._assert`: conditions without a value in a trace are skipped."""
    if not isinstance(condition, Tensor | torch.SymBool) and not condition:
        raise AssertionError(message)


PATCH = Patch(replacements={TORCH_ASSERT: _assert_unless_traced}, rewrite_program=without_assertions)
