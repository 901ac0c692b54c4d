"""`torch._foreach_mul_(tensors, 0.9)` and other operators on lists of tensors.

Torch: one operator that writes each tensor of a list, which has no rule.
Wanted: one operator a tensor.
Test: tests/torch/capture/test_untraceable.py::test_what_can_be_held_is_what_eager_computes
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.patches.patch import Patch

_NAMES = [name for name in dir(torch) if name.startswith("_foreach_")]
_FOR_EACH = {"alpha", "value", "weight", "ord"}  # keyword arguments shared by all tensors


def _apply_to_each(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name.removeprefix("_foreach_"), None)

    def apply(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        operands, keywords = list(args), dict(kwargs)
        if method is None or not isinstance(tensors, list | tuple) or keywords.keys() - _FOR_EACH:
            return NotImplemented
        if "addc" in name and len(operands) > 2:
            keywords["value"] = operands.pop()
        if isinstance(keywords.get("value"), list | tuple | Tensor):
            return NotImplemented
        results = [method(x, *(o[i] if isinstance(o, list | tuple) else o for o in operands), **keywords) for i, x in enumerate(tensors)]
        return None if name.endswith("_") else tuple(results)

    return apply


PATCH = Patch(replacements={getattr(torch, name): _apply_to_each(name) for name in _NAMES})
