"""Operators along a sharded dimension that combine what each rank computes of its shard: extremes, running sums, masked scatter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.world.world import Group


class _ShardedExtreme(torch.autograd.Function):
    """Besides its output forward allocates no tensor as large as x. The gradient is shared evenly among all elements equal to the extreme,
    on whichever rank they are, as in torch."""

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
    @refuse_second_derivatives("a maximum or minimum", "tensor or context")
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


class _ExclusiveSum(torch.autograd.Function):
    """Exclusive prefix sum of each rank's total `x_...1...`; backward sums the gradients of later ranks."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(total.unsqueeze(0), 0)[: group.index].sum(0)

    @staticmethod
    @refuse_second_derivatives("a running sum", "context")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad.unsqueeze(0), 0)[ctx.group.index + 1 :].sum(0), None


def running_sum(group: Group, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return `cumsum` of `x` along `dim`, which is sharded over `group` in rank order."""
    sums = torch.cumsum(x, dim, dtype=dtype)
    offset: Tensor = _ExclusiveSum.apply(x.sum(dim, keepdim=True, dtype=sums.dtype), group)  # type: ignore[no-untyped-call]
    return sums + offset


def masked_scatter(group: Group, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return x with the mask's elements from `source`; `x_N...` and `mask_N...` (broadcastable) are sharded over `group` in rank order,
    and a rank's elements come after those that earlier ranks take. The full source gets this rank's partial sum of its gradient."""
    is_target = mask.expand_as(x)
    counts = group.all_gather(is_target.sum().reshape(1), 0)
    num_before = counts[: group.index].sum()
    flat = source.reshape(-1)
    indices = (torch.arange(x.numel(), device=x.device) + num_before).clamp(max=flat.numel() - 1)
    return x.masked_scatter(is_target, flat[indices])
