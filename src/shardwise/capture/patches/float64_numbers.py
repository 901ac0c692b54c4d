"""Tensors of numbers that float32 rounds (`torch.tensor(0.1)`, `x[0] = 0.1`).

Torch: a trace has them as float32, since the trace runs in float32.
Wanted: the exact numbers, for any precision that the graph runs in; a run in float64 uses 0.1, not its float32 rounding.
Test: tests/torch/capture/test_patches.py::float64_numbers
Until: not known
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.fakes import tree_flatten
from shardwise.capture.patches.patch import Patch

_TENSOR_CONSTRUCTORS = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


def exact_float64(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the float64 tensor of numbers that `func(*args)` would round to float32 (0.1, not 0.5); None for any other call."""
    if func not in _TENSOR_CONSTRUCTORS:
        return None
    at = 1 if func is Tensor.new_tensor else 0
    data = args[at] if len(args) > at else kwargs.get("data")
    numbers = tree_flatten(data)[0]
    if any(type(x) not in (int, float, bool) for x in numbers) or all(ctypes.c_float(x).value == x for x in numbers):
        return None
    dtype = kwargs.get("dtype") or (args[0].dtype if at else torch.get_default_dtype())
    if kwargs.get("requires_grad") or dtype is not torch.float32:
        return None
    return torch.tensor(data, dtype=torch.float64, device=kwargs.get("device"))


def _exact_constructor(func: Any) -> Callable[..., Any]:
    def construct(*args: Any, **kwargs: Any) -> Any:
        exact = exact_float64(func, args, kwargs)
        return NotImplemented if exact is None else exact.to(torch.float32)

    return construct


def _set_item(into: Tensor, at: Any, value: Any) -> Any:
    """Set an item to the exact number, which torch would convert to float32."""
    if not isinstance(value, float) or not into.is_floating_point():
        return NotImplemented
    exact = exact_float64(torch.tensor, (value,), {})
    return NotImplemented if exact is None else Tensor.__setitem__(into, at, exact.to(torch.float32))


PATCH = Patch(replacements={Tensor.__setitem__: _set_item, **{func: _exact_constructor(func) for func in _TENSOR_CONSTRUCTORS}})
