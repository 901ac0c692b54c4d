"""`part.to(dtype)` in a model's forward, where the part is of that dtype already.

Torch: even an equal tensor is put in a parameter's place, which a trace refuses; and while all is made float64, a copy.
Wanted: parameters and buffers stay the tensors that they are, which others hold: a trace, an optimizer, a flat buffer.
Test: tests/torch/test_patches.py::casts
Until: not known
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.fakes import MODULE_APPLY, put
from weft.capture.patches.patch import Patch

_APPLY: Any = getattr(nn.Module, MODULE_APPLY)


def _kept(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    held = {(x.dtype, x.device) for x in (*module.parameters(recurse), *module.buffers(recurse))}
    # Tried on others: a trace would take what comes out of a parameter, itself or not, for what is read from then on.
    unchanged = all(_is_copy_of(x, change(x)) for x in (torch.empty(1, dtype=dtype, device=device) for dtype, device in held))
    return module if unchanged else _APPLY(module, change, recurse)


def _is_copy_of(before: Tensor, after: Tensor) -> bool:
    return before.dtype == after.dtype and before.device == after.device


def without_casts() -> AbstractContextManager[None]:
    """A block in which such calls change nothing."""
    return put(nn.Module, MODULE_APPLY, _kept)


PATCH = Patch(while_called=lambda trace: without_casts())
