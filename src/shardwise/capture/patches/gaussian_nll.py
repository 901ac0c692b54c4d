"""`F.gaussian_nll_loss` with variances that are a tensor.

Torch: it reads the values of `var`, to check whether one is negative.
Wanted: (log var + (input - target)^2 / var) / 2 without the check.
Test: tests/torch/capture/test_patches.py::gaussian_nll
Until: not known
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.capture.patches.patch import Patch


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    if not isinstance(var, Tensor):
        return NotImplemented
    if var.dim() == input.dim() - 1 and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()  # torch clamps it without affecting the gradient
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


PATCH = Patch(replacements={F.gaussian_nll_loss: _gaussian_nll_loss})
