"""`F.affine_grid`: the points of a grid transformed by `theta_N23` (or `_N34`).

Torch: one operator with the number of samples in its arguments, which no rule shards.
Wanted: a matrix product with all points, with an ordinary sample dimension.
Test: tests/torch/capture/test_patches.py::affine_grid
Until: not known
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.capture.patches.patch import Patch


def _affine_grid(theta: Tensor, size: Any, align_corners: bool | None = None) -> Any:
    dims = len(size) - 2
    if theta.dim() != 3 or dims not in (2, 3) or tuple(theta.shape[1:]) != (dims, dims + 1) or theta.shape[0] != size[0]:
        return NotImplemented
    ends = [1.0 if align_corners else (n - 1) / n for n in size[2:]]
    lines = [
        torch.linspace(-end, end, n, dtype=theta.dtype) if n > 1 else torch.zeros(1, dtype=theta.dtype)
        for end, n in zip(ends, size[2:], strict=True)
    ]
    points = torch.stack([*reversed(torch.meshgrid(*lines, indexing="ij")), torch.ones(size[2:], dtype=theta.dtype)], -1)
    return (points.reshape(-1, dims + 1) @ theta.transpose(1, 2)).reshape(-1, *size[2:], dims)


PATCH = Patch(replacements={F.affine_grid: _affine_grid})
