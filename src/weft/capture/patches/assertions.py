"""Checks of values by torch's own functions: `torch._check(n <= limit)`, "as many image tokens as features".

Torch: it asserts, in a trace also what it assumes itself of numbers that follow values, and holds these checks as operators.
Wanted: no such operators, no numbers that only they read, nor what nobody reads whose shape follows values. What a check guards is the
    user's data, the same in every layout; a run does not repeat it. A shape that a check chooses is refused as data-dependent.
Test: tests/torch/test_checks.py::test_checks_are_no_operators
Until: not known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.capture.fakes import ASSERT
from weft.capture.patches.patch import Patch

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
    """Erase them in place."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users and (str(node.target) in _CHECKS or _is_number(node) or _is_data_dependent(node)):
            module.graph.erase_node(node)
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):
            without_assertions(child)


def _is_number(node: Any) -> bool:
    """Whether it computes a number of the program's own, in which nothing is written."""
    return isinstance(node.meta.get("val"), _NUMBERS)


def _is_data_dependent(node: Any) -> bool:
    """Whether it makes a tensor that has as many elements as the values of another say; what is written into has its own."""
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(not isinstance(n, int) for n in value.shape)


def _checked(condition: Any, message: str) -> None:
    """What torch asserts: of values that a trace does not know it is passed over."""
    if not isinstance(condition, Tensor | torch.SymBool) and not condition:
        raise AssertionError(message)


PATCH = Patch(calls={ASSERT: _checked}, program=without_assertions)
