"""`torch.cov` and `torch.corrcoef`.

Torch: it reads the value of its divisor.
Wanted: the covariance of rows (variables) over columns (observations), without the read; with weights torch's own is called.
Test: tests/torch/capture/test_patches.py::covariance
Until: not known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.capture.patches.patch import Patch


def _cov(input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Any:
    if fweights is not None or aweights is not None or input.dim() not in (1, 2) or not input.is_floating_point():
        return NotImplemented
    rows_VN = input if input.dim() == 2 else input[None]
    centred_VN = rows_VN - rows_VN.mean(1, keepdim=True)
    number = max(rows_VN.shape[1] - correction, 0)
    return (centred_VN @ centred_VN.t() / number).squeeze()


def _corrcoef(input: Tensor) -> Any:
    cov = _cov(input)
    if cov is NotImplemented or not cov.dim():
        return cov if cov is NotImplemented else cov / cov
    deviation_V = cov.diagonal().sqrt()
    return (cov / deviation_V[:, None] / deviation_V).clamp(-1, 1)


PATCH = Patch(replacements={torch.cov: _cov, Tensor.cov: _cov, torch.corrcoef: _corrcoef, Tensor.corrcoef: _corrcoef})
