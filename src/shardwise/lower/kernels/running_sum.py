"""Running sum along a sharded dimension: each rank's own, plus the totals of the ranks before it.

Shards are in rank order. Backward runs the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.world.world import Group


class _ExclusiveSum(torch.autograd.Function):
    """Exclusive prefix sum of each rank's total `x_...1...`; backward sums the gradients of later ranks."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(total.unsqueeze(0), 0)[: group.index].sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad.unsqueeze(0), 0)[ctx.group.index + 1 :].sum(0), None


def running_sum(group: Group, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return `cumsum` of `x` along `dim`, which is sharded over `group`."""
    sums = torch.cumsum(x, dim, dtype=dtype)
    offset: Tensor = _ExclusiveSum.apply(x.sum(dim, keepdim=True, dtype=sums.dtype), group)  # type: ignore[no-untyped-call]
    return sums + offset
