"""`torch.bincount` with as many bins as `minlength` says.

Torch: it has as many bins as the largest value wants, a shape that follows values.
Wanted: counts of 0 ... `minlength` - 1, which nothing may exceed (a run says so).
Test: tests/torch/test_patches.py::bincount
Until: not known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.capture.patches.patch import Patch


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    if not minlength or input.dim() != 1:
        return NotImplemented
    dtype = torch.int64 if weights is None else weights.dtype if weights.is_floating_point() else torch.float64
    added = torch.ones_like(input, dtype=dtype) if weights is None else weights.to(dtype)
    return torch.zeros(minlength, dtype=dtype).scatter_add(0, input.long(), added)


PATCH = Patch(calls={torch.bincount: _bincount, Tensor.bincount: _bincount})
