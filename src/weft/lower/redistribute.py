"""Redistributions: a collective forward and its dual backward, as autograd functions.

In: a local tensor and the group of one mesh axis. Out: the local tensor in another form (see `model/propagate.py` for the forms).
So the backward communication is right by construction, whatever the model does in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.plan.placement import piece
from weft.world.world import Group


def _slice(x: Tensor, dim: int, group: Group) -> Tensor:
    start, length = piece(x.shape[dim], group.size, group.index)
    return x.narrow(dim, start, length)


def _all_reduced(x: Tensor, group: Group) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(out)
    return out


class _Summed(torch.autograd.Function):
    """P -> R: all-reduce forward, nothing backward. Megatron's g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Divided(torch.autograd.Function):
    """R -> P: this rank's equal share forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return x / group.size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Counted(torch.autograd.Function):
    """Nothing forward, a part of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.share, None


def counted(x: Tensor, share: float) -> Tensor:
    """`x`, of whose gradient this rank counts a part, where all ranks that sum it have some."""
    return _Counted.apply(x, share) if x.is_floating_point() else x  # type: ignore[no-untyped-call]


class _Shared(torch.autograd.Function):
    """R -> +: nothing forward, all-reduce backward. Megatron's f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _SummedShared(torch.autograd.Function):
    """P -> +: all-reduce both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduced(grad, ctx.group), None


class _Sliced(torch.autograd.Function):
    """R -> S: this rank's piece forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _slice(x, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(grad.contiguous(), ctx.dim), None, None


class _SlicedPadded(torch.autograd.Function):
    """+ -> S: this rank's piece forward; backward it is this rank's summand, zero elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.shape = group, dim, x.shape
        return _slice(x, dim, group).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_zeros(ctx.shape)
        _slice(out, ctx.dim, ctx.group).copy_(grad)
        return out, None, None


class _Gathered(torch.autograd.Function):
    """S -> R: all-gather forward, this rank's piece backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x.contiguous(), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _slice(grad, ctx.dim, ctx.group).contiguous(), None, None


class _GatheredShared(torch.autograd.Function):
    """S -> +: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.all_gather(x.contiguous(), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.reduce_scatter(grad, ctx.dim), None, None


class _Scattered(torch.autograd.Function):
    """P -> S: reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.reduce_scatter(x, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.all_gather(grad.contiguous(), ctx.dim), None, None


class _Exchanged(torch.autograd.Function):
    """S(a) -> S(b): all-to-all both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, source: int, target: int) -> Tensor:
        ctx.group, ctx.source, ctx.target = group, source, target
        return group.all_to_all(x, split_dim=target, concat_dim=source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.all_to_all(grad, split_dim=ctx.source, concat_dim=ctx.target), None, None, None


def redistribute(x: Tensor, source: str, target: str, group: Group) -> Tensor:
    """The same tensor in form `target`, from form `source`, over `group`; differentiable.

    Integers and other tensors without a gradient take the same path forward.
    """
    if x.is_complex():  # gloo carries no complex numbers, but pairs of real ones
        pairs = redistribute(torch.view_as_real(x.resolve_conj()), source, target, group)
        return torch.view_as_complex(pairs.contiguous())
    a, b = source[0], target[0]
    dim = int(target[1:]) if b == "S" else int(source[1:]) if a == "S" else 0
    match a + b:
        case "PR":
            return _Summed.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
        case "R+":
            return _Shared.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
        case "P+":
            return _SummedShared.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
        case "RP":
            return _Divided.apply(x, group)  # type: ignore[no-any-return,no-untyped-call]
        case "+P":
            return x / group.size
        case "RS":
            return _Sliced.apply(x, group, dim)  # type: ignore[no-any-return,no-untyped-call]
        case "+S":
            return _SlicedPadded.apply(x, group, dim)  # type: ignore[no-any-return,no-untyped-call]
        case "SR":
            return _Gathered.apply(x, group, dim)  # type: ignore[no-any-return,no-untyped-call]
        case "S+":
            return _GatheredShared.apply(x, group, dim)  # type: ignore[no-any-return,no-untyped-call]
        case "PS":
            return _Scattered.apply(x, group, dim)  # type: ignore[no-any-return,no-untyped-call]
        case "SS":
            return _Exchanged.apply(x, group, int(source[1:]), int(target[1:]))  # type: ignore[no-any-return,no-untyped-call]
    raise AssertionError(f"no redistribution from {source} to {target}")
