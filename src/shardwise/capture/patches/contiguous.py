"""`contiguous()` of a tensor with a dimension of one entry.

Torch: it is a no-op on contiguous tensors, which a slice of one sample may be and of two is not, so that a microbatch of one sample has
another graph than any other.
Wanted: the same operators for any number of samples; the operator copies nothing there.
Test: tests/torch/capture/test_patches.py::contiguous
Until: not known
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.patches.patch import Patch


def _contiguous(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    in_order = [*accumulate((1, *reversed(x.shape[1:])), mul)][::-1]
    if args or kwargs or not x.is_contiguous() or list(x.stride()) == in_order:
        return NotImplemented
    return torch.ops.aten.contiguous.default(x)


PATCH = Patch(replacements={Tensor.contiguous: _contiguous})
