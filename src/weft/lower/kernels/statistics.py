"""Batch norm over a batch that is cut: statistics of the whole microbatch, equal to the serial model's.

Mean and variance are reduced in two steps, mean first, since E[x^2] - E[x]^2 loses digits. The running statistics that every rank
keeps are those of the serial model. The gradient is written in the closed form that torch's own operator has: where few values are
normalised it is what is left of terms that cancel, and differentiating the two reductions would leave more rounding (and reduce twice).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.world.world import Group


@dataclass(slots=True)
class Later:
    """What the microbatches of a step would write to one buffer, which is written after the step.

    `statistics`: by microbatch, (momentum, value) of each time it is averaged into. `writes`: by microbatch, writes that take nothing
    from the batch (counts), so that each microbatch makes the same.
    """

    statistics: dict[int, list[tuple[float, Tensor]]] = field(default_factory=dict)
    writes: dict[int, list[Callable[[], object]]] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget a step."""
        self.statistics.clear()
        self.writes.clear()


def summed(x: Tensor, groups: tuple[Group, ...]) -> Tensor:
    """`x` summed over all groups, in place."""
    for group in groups:
        group.all_reduce(x)
    return x


class _Normalised(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias, with mean and deviation functions of x over all ranks (Ioffe and Szegedy 2015)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        inverse: Tensor,
        count: int,
        groups: tuple[Group, ...],
    ) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.count, ctx.groups, ctx.has_bias = count, groups, bias is not None
        scale = inverse if weight is None else inverse * weight
        out = (x - mean.view(shape)) * scale.view(shape)
        return out if bias is None else out + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None, None]:
        x, weight, mean, inverse = ctx.saved_tensors
        dims, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
        centred = x - mean.view(shape)
        mine = torch.stack((grad.sum(dim=dims), (grad * centred).sum(dim=dims)))
        # Weight and bias get this rank's summands: their gradients are summed with all the others.
        for_weight = mine[1] * inverse if weight is not None else None
        for_bias = mine[0].clone() if ctx.has_bias else None
        both = summed(mine, ctx.groups) / ctx.count
        scale = inverse if weight is None else inverse * weight
        rest = grad - both[0].view(shape) - centred * (both[1] * inverse * inverse).view(shape)
        return rest * scale.view(shape), for_weight, for_bias, None, None, None, None


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
    with torch.no_grad():
        mean = summed(x.sum(dim=dims), groups) / count
        var = summed((x - mean.view(shape)).square().sum(dim=dims), groups) / count
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
        inverse = torch.rsqrt(var + eps)
    out: Tensor = _Normalised.apply(x, weight, bias, mean, inverse, count, groups)  # type: ignore[no-untyped-call]
    return out.to(kept.dtype)
