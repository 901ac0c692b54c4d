"""`submodule.to(dtype)` in a model's forward, if the submodule has that dtype already.

Torch: it replaces parameters even by equal tensors, which a trace refuses; and by copies in a conversion to float64.
Wanted: parameters and buffers stay the same tensors, which a trace, an optimizer, a flat buffer refer to.
Test: tests/torch/capture/test_patches.py::casts
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.fakes import MODULE_APPLY, patched_attribute
from shardwise.capture.patches.patch import Patch

_APPLY: Any = getattr(nn.Module, MODULE_APPLY)


def _apply_unless_unchanged(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    types = {(x.dtype, x.device) for x in (*module.parameters(recurse), *module.buffers(recurse))}
    # Tried on other tensors: a trace would record the result for a parameter as its new value.
    unchanged = all(_has_equal_type(x, change(x)) for x in (torch.empty(1, dtype=dtype, device=device) for dtype, device in types))
    return module if unchanged else _APPLY(module, change, recurse)


def _has_equal_type(before: Tensor, after: Tensor) -> bool:
    return before.dtype == after.dtype and before.device == after.device


def without_casts() -> AbstractContextManager[None]:
    """A block in which casts to the present dtype are no-ops."""
    return patched_attribute(nn.Module, MODULE_APPLY, _apply_unless_unchanged)


PATCH = Patch(while_called=lambda trace: without_casts())
