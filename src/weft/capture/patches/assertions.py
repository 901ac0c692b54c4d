"""Checks of values, taken out of what `torch.export` made: `assert lengths.max() <= limit`, "as many image tokens as features".

In: an exported program's graph module. Out: the same without calls that only check, and without numbers that only such calls read, in the
blocks inside as well; without what nobody reads whose shape follows values, too. What such a check guards is the user's data, which is the
same in every layout; a run does not repeat it. Not modelled: checks by which a shape is chosen; such a shape is refused as data-dependent.
"""

from __future__ import annotations

from typing import Any

import torch

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
        if node.op == "call_function" and not node.users and (str(node.target) in _CHECKS or _is_number(node) or _is_picked(node)):
            module.graph.erase_node(node)
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):
            without_assertions(child)


def _is_number(node: Any) -> bool:
    """Whether it computes a number of the program's own, in which nothing is written."""
    return isinstance(node.meta.get("val"), _NUMBERS)


def _is_picked(node: Any) -> bool:
    """Whether it makes a tensor that has as many elements as the values of another say; what is written into has its own."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(not isinstance(n, int) for n in value.shape)
