"""Maximum or minimum over sharded dimensions: each rank's own, then the extreme of those.

The gradient is shared evenly among all elements equal to the extreme, on whichever rank they are, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.world.world import Group


class _ShardedExtreme(torch.autograd.Function):
    """Besides its output forward allocates no tensor as large as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: list[int], keeps: bool, largest: bool, groups: tuple[Group, ...]) -> Tensor:
        reduce_op = torch.amax if largest else torch.amin
        values = reduce_op(x, dims, keepdim=True)
        for group in groups:
            values = reduce_op(group.all_gather(values.unsqueeze(0), 0), 0)
        ctx.save_for_backward(x, values)
        ctx.dims, ctx.groups = dims, groups
        return values if keeps else values.squeeze(dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, values = ctx.saved_tensors
        equal = x == values
        count = equal.sum(ctx.dims, keepdim=True).to(grad.dtype)
        for group in ctx.groups:
            group.all_reduce(count)
        return equal * (grad.reshape(values.shape) / count), None, None, None, None


def sharded_extreme(groups: tuple[Group, ...], largest: bool, x: Tensor, dims: list[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return `amax` (or `amin`) of `x` over `dims` (default: all of them), some of which are sharded over `groups`."""
    over = [d % x.dim() for d in dims] if dims else list(range(x.dim()))
    out: Tensor = _ShardedExtreme.apply(x, over, keepdim, largest, groups)  # type: ignore[no-untyped-call]
    return out
