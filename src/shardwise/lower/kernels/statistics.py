"""Synchronized batch norm over a sharded batch: statistics of the whole microbatch, equal to the serial model's.

Every rank normalizes its shard by torch's own kernel, means and variances of the shards are gathered and merged (Chan et al. 1983: the
variance of the whole is the mean of the shards' and the variance of their means, where E[x^2] - E[x]^2 would lose digits), and the output
is shifted and rescaled to the merged statistics. Running statistics of every rank are those of the serial model. The gradient is in the
closed form of torch's operator: with few values it is a difference of nearly equal terms, and differentiating the statistics would leave
more rounding (and reduce twice). Its two sums by channel are computed by torch's kernel as well.

Buffers are written while the model runs: updates in place, and norms with running statistics. A recomputed forward writes nothing, and
writes of later microbatches to one buffer may be deferred until after the step, as `DrawState` says.

In the field's terms: batch statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.world.world import Group

_LEAST = 1e-30  # added to a shard's variance, in case all values are equal: negligible otherwise


StatisticsGroups = tuple[tuple[Group, tuple[float, ...]], ...]  # groups over which a tensor is sharded, with each member's fraction


def all_reduce_over_groups(x: Tensor, parts: StatisticsGroups) -> Tensor:
    """Sum `x` over all groups, in place."""
    for group, _ in parts:
        group.all_reduce(x)
    return x


def merge_statistics(mean: Tensor, var: Tensor, parts: StatisticsGroups) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the whole from those of every rank's shard; the same bits on all ranks."""
    for group, shares in parts:
        means, variances = group.all_gather(torch.stack((mean, var)).unsqueeze(1), 1)
        share = means.new_tensor(shares).unsqueeze(1)
        mean = (means * share).sum(0)
        var = (variances * share).sum(0) + ((means - mean).square() * share).sum(0)
    return mean, var


class _ShardedBatchNorm(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias, with mean and deviation of x over all ranks (Ioffe and Szegedy 2015). Besides its output
    neither pass allocates a tensor as large as x; a 16-bit x, which is what is saved, is processed as a float32 copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        momentum: float,
        eps: float,
        parts: StatisticsGroups,
    ) -> Tensor:
        shape, count = _channel_shape(x), round(x.numel() // x.shape[1] / prod(shares[group.index] for group, shares in parts))
        out, rank_mean, rank_inverse = torch.native_batch_norm(_as_float32(x), None, None, None, None, True, 0.0, _LEAST)
        mean, var = merge_statistics(rank_mean, rank_inverse.square().reciprocal_().sub_(_LEAST), parts)
        if running is not None:
            running[0].lerp_(mean.to(running[0].dtype), momentum)
            running[1].lerp_((var * (count / max(count - 1, 1))).to(running[1].dtype), momentum)
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.parts, ctx.has_bias = count, parts, bias is not None
        scale = inverse if weight is None else inverse * weight
        shift = (rank_mean - mean) * scale
        return out.mul_((scale / rank_inverse).view(shape)).add_((shift if bias is None else shift + bias).view(shape)).to(x.dtype)

    @staticmethod
    @refuse_second_derivatives("batch norm in training", "data")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None]:
        normal, weight, mean, inverse = ctx.saved_tensors
        shape, x, grad = _channel_shape(normal), _as_float32(normal), _as_float32(grad.contiguous())
        # torch's backward kernel for normalization by these: the sums of the gradient times the normalized values, and of the gradient.
        # Called with weights, on which these sums do not depend: without, GPUs compute none for channels-last tensors.
        _, times, by_bias = torch.ops.aten.native_batch_norm_backward.default(
            grad, x, torch.ones_like(mean), None, None, mean, inverse, True, 0.0, [False, True, True]
        )
        local_sums = torch.stack((by_bias, times))
        # Weight and bias get this rank's partial gradients, which are reduced with all others.
        for_weight = times if weight is not None else None
        for_bias = by_bias if ctx.has_bias else None
        means = all_reduce_over_groups(local_sums, ctx.parts) / ctx.count
        scale = inverse if weight is None else inverse * weight
        x_gradient = x - mean.view(shape) if x is normal else x.sub_(mean.view(shape))
        x_gradient.mul_(-(means[1] * inverse).view(shape)).add_(grad).sub_(means[0].view(shape)).mul_(scale.view(shape))
        return x_gradient.to(normal.dtype), for_weight, for_bias, None, None, None, None


def _as_float32(x: Tensor) -> Tensor:
    """Cast to float32 what is narrower."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _channel_shape(x: Tensor) -> list[int]:
    """Return the shape that broadcasts one value per channel over NC..."""
    return [1, -1] + [1] * (x.dim() - 2)


def sharded_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    parts: StatisticsGroups,
) -> Tensor:
    """Return batch norm in training of `x_NC...`, sharded over the groups of `parts` (samples, or positions of the image)."""
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    out: Tensor = _ShardedBatchNorm.apply(x, weight, bias, running, momentum, eps, parts)  # type: ignore[no-untyped-call]
    return out


class _ShardedGroupNorm(torch.autograd.Function):
    """Group norm with statistics over all ranks: batch norm of one sample with a channel for each group of each sample, whose output is
    scaled and shifted by channel. It saves x, and neither pass allocates a tensor as large as x besides its output."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, parts: StatisticsGroups
    ) -> Tensor:
        rows = _as_float32(x.reshape(1, x.shape[0] * num_groups, -1))
        out, rank_mean, rank_inverse = torch.native_batch_norm(rows, None, None, None, None, True, 0.0, _LEAST)
        mean, var = merge_statistics(rank_mean, rank_inverse.square().reciprocal_().sub_(_LEAST), parts)
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count = round(rows.shape[2] / prod(shares[group.index] for group, shares in parts))
        ctx.parts, ctx.has_bias = parts, bias is not None
        out = out.mul_((inverse / rank_inverse).view(-1, 1)).add_(((rank_mean - mean) * inverse).view(-1, 1)).view(x.shape)
        out = out if weight is None else out.mul_(weight.view(_channel_shape(x)))
        return (out if bias is None else out.add_(bias.view(_channel_shape(x)))).to(x.dtype)

    @staticmethod
    @refuse_second_derivatives("group norm", "spatial")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        x, weight, mean, inverse = ctx.saved_tensors
        num_rows, num_channels = len(mean), x.shape[0] * x.shape[1]
        wide, grad_NCS = _as_float32(x.reshape(1, num_channels, -1)), _as_float32(grad.reshape(1, num_channels, -1))
        mean_NC, inverse_NC = (statistic.repeat_interleave(num_channels // num_rows) for statistic in (mean, inverse))
        # By channel of each sample: the sums of the gradient times the normalized values, and of the gradient.
        _, times, sums = torch.ops.aten.native_batch_norm_backward.default(
            grad_NCS, wide, torch.ones_like(mean_NC), None, None, mean_NC, inverse_NC, True, 0.0, [False, True, True]
        )
        for_weight, for_bias = (total.view(x.shape[:2]).sum(0) for total in (times, sums))
        scale_NC = None if weight is None else weight.to(wide.dtype).repeat(x.shape[0])
        by_group = [(total if scale_NC is None else total * scale_NC).view(num_rows, -1).sum(1) for total in (sums, times)]
        means = all_reduce_over_groups(torch.stack(by_group), ctx.parts) / ctx.count
        rows = (wide.sub_(mean_NC.view(-1, 1)) if x.dtype != wide.dtype else wide - mean_NC.view(-1, 1)).view(1, num_rows, -1)
        rows.mul_(-(means[1] * inverse).view(-1, 1)).sub_(means[0].view(-1, 1))
        by_channel = rows.view(1, num_channels, -1)
        by_channel = by_channel.add_(grad_NCS) if scale_NC is None else by_channel.addcmul_(grad_NCS, scale_NC.view(-1, 1))
        x_gradient = by_channel.mul_(inverse_NC.view(-1, 1)).view(x.shape).to(x.dtype)
        return x_gradient, None if weight is None else for_weight, for_bias if ctx.has_bias else None, None, None, None


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, num_groups: int, eps: float, parts: StatisticsGroups) -> Tensor:
    """Return group norm of `x_NC...` (Wu and He 2018), with positions sharded over the groups of `parts`; instance norm has one group per
    channel."""
    out: Tensor = _ShardedGroupNorm.apply(x, weight, bias, num_groups, eps, parts)  # type: ignore[no-untyped-call]
    return out


def write_buffer(target: Callable[..., Any], draw: DrawState, buffer: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Update the buffer in place by `target`, and return it."""
    if draw.is_recomputing:
        return buffer
    later = draw.deferred_writes.get(id(buffer))
    if later is not None:
        later.writes.setdefault(draw.microbatch, []).append(lambda: target(buffer, *args, **kwargs))
        return buffer
    with torch.no_grad():
        # With a version of its own: parameters share a buffer, and autograd takes a write to one as one to all.
        target(buffer.data if buffer.requires_grad else buffer, *args, **kwargs)
    return buffer


def batch_norm(draw: DrawState, parts: StatisticsGroups, x: Tensor, *as_torch: Any) -> Tensor:
    """Return torch's batch norm in training, with statistics over `parts`."""
    weight, bias, mean, var, training, momentum, eps = as_torch[:7]
    if mean is not None and var is not None:
        if draw.is_recomputing:
            mean, var = mean.clone(), var.clone()  # updated in the first forward; without them, torch would save other tensors
        elif id(mean) in draw.deferred_writes:
            running = torch.zeros_like(mean), torch.zeros_like(var)
            for buffer, value in zip((mean, var), running, strict=True):
                draw.deferred_writes[id(buffer)].statistics.setdefault(draw.microbatch, []).append((momentum, value))
            (mean, var), momentum = running, 1.0  # the statistics of this microbatch alone
    if not parts:
        return torch.ops.aten.batch_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]
    return sharded_batch_norm(x, weight, bias, mean, var, momentum, eps, parts)


def instance_norm(draw: DrawState, x: Tensor, *as_torch: Any) -> Tensor:
    """Return torch's instance norm in training, with running statistics."""
    weight, bias, mean, var, training, momentum, eps = as_torch[:7]
    if draw.is_recomputing:
        mean, var = mean.clone(), var.clone()
    return torch.ops.aten.instance_norm.default(x, weight, bias, mean, var, training, momentum, eps, False)  # type: ignore[no-any-return]
