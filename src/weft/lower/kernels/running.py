"""A running sum along a dimension that is cut: each rank's own, behind the sum of what ranks before it have.

In: this rank's piece, pieces in the order of ranks. Out: its piece of the running sum. Backward runs the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.world.world import Group


class _Before(torch.autograd.Function):
    """Of each rank's total `x_...1...` the sum over the ranks before it, and backward of the gradients over those behind it."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(total.unsqueeze(0), 0)[: group.index].sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad.unsqueeze(0), 0)[ctx.group.index + 1 :].sum(0), None


def running_sum(group: Group, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """`cumsum` of `x` along `dim`, which is cut over `group`."""
    sums = torch.cumsum(x, dim, dtype=dtype)
    before: Tensor = _Before.apply(x.sum(dim, keepdim=True, dtype=sums.dtype), group)  # type: ignore[no-untyped-call]
    return sums + before
