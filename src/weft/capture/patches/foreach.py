"""`torch._foreach_mul_(tensors, 0.9)` and the like, of lists of tensors.

Torch: one operator that writes each tensor of a list, which no rule follows.
Wanted: the same for each tensor by itself.
Test: tests/torch/test_untraceable.py::test_what_can_be_held_is_what_eager_computes
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.capture.patches.patch import Patch

_NAMES = [name for name in dir(torch) if name.startswith("_foreach_")]
_FOR_EACH = {"alpha", "value", "weight", "ord"}  # arguments by name that are the same for each


def _one_by_one(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name.removeprefix("_foreach_"), None)

    def made(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        others, named = list(args), dict(kwargs)
        if method is None or not isinstance(tensors, list | tuple) or named.keys() - _FOR_EACH:
            return NotImplemented
        if "addc" in name and len(others) > 2:
            named["value"] = others.pop()
        if isinstance(named.get("value"), list | tuple | Tensor):
            return NotImplemented
        each = [method(x, *(o[i] if isinstance(o, list | tuple) else o for o in others), **named) for i, x in enumerate(tensors)]
        return None if name.endswith("_") else tuple(each)

    return made


PATCH = Patch(calls={getattr(torch, name): _one_by_one(name) for name in _NAMES})
