"""Batch norm over a batch that is cut: statistics of the whole microbatch, equal to the serial model's.

Mean and variance are reduced in two steps, mean first, since E[x^2] - E[x]^2 loses digits. The running statistics that every rank
keeps are those of the serial model. Gradients follow from differentiating the two reductions.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.world.world import Group


class _SumOver(torch.autograd.Function):
    """All-reduce forward and backward: every rank uses the sum for its own share of what follows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        out = x.clone()
        group.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.clone()
        ctx.group.all_reduce(out)
        return out, None


def _sum(x: Tensor, groups: tuple[Group, ...]) -> Tensor:
    for group in groups:
        x = _SumOver.apply(x, group)  # type: ignore[no-untyped-call]
    return x


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    groups: tuple[Group, ...],
) -> Tensor:
    """Batch norm in training of `x_NC...`, cut over `groups` in equal parts (samples, or positions of the image)."""
    kept = x
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    dims = [0, *range(2, x.dim())]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.numel() // x.shape[1] * prod(group.size for group in groups)
    mean = _sum(x.sum(dim=dims), groups) / count
    centred = x - mean.view(shape)
    var = _sum((centred * centred).sum(dim=dims), groups) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    out = centred * scale.view(shape)
    if bias is not None:
        out = out + bias.view(shape)
    return out.to(kept.dtype)
