"""`torch.bincount` with `minlength` bins.

Torch: the number of bins depends on the largest value, a data-dependent shape.
Wanted: counts of 0 ... `minlength` - 1; larger values are an error at run time.
Test: tests/torch/capture/test_patches.py::bincount
Until: not known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.capture.patches.patch import Patch


def _bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Any:
    if not minlength or input.dim() != 1:
        return NotImplemented
    dtype = torch.int64 if weights is None else weights.dtype if weights.is_floating_point() else torch.float64
    added = torch.ones_like(input, dtype=dtype) if weights is None else weights.to(dtype)
    return torch.zeros(minlength, dtype=dtype).scatter_add(0, input.long(), added)


PATCH = Patch(replacements={torch.bincount: _bincount, Tensor.bincount: _bincount})
