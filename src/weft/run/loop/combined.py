"""Global reductions of sharded tensors that factor rules do not express: norms, extremes, any and all.

Each function replaces a torch function called on a shard (`run/loop/sharded_tensor`) and returns the full tensor's result on every rank,
with its gradient, or `NotImplemented` for calls that are left to the factor rules. Every rank calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from weft.lower.kernels.extremes import extreme
from weft.world import private
from weft.world.world import Group


class Part(Tensor):
    """A shard of the tensor that `spec` describes: its placements and the groups of the other shards; see `run/loop/sharded_tensor`."""

    full: Any


class _Summed(torch.autograd.Function):
    """All-reduce of the ranks' tensors, each times its share, in a wider dtype; every rank gets the sum's gradient times its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, group: Group) -> Tensor:
        ctx.share = share
        total = x.detach().to(_widest(x), copy=True, memory_format=torch.contiguous_format)
        if share != 1.0:
            total *= share
        group.all_reduce(total)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.share, None, None


def _widest(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else torch.int64


def summed(x: Tensor, share: float, group: Group) -> Tensor:
    """Return the sum over ranks of `x` times `share`, on every rank."""
    total: Tensor = _Summed.apply(x, share, group)  # type: ignore[no-untyped-call]
    return total


class _Norm(torch.autograd.Function):
    """The p-norm of a sharded tensor from the norms of its shards."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, groups: Sequence[Group], p: float) -> Tensor:
        exact = part.detach().to(torch.float64)
        powered = exact.pow(p) if p else exact.clone()
        for group in groups:
            group.all_reduce(powered)
        total = powered.pow(1 / p) if p else powered
        ctx.p = p
        ctx.save_for_backward(exact, total)
        return total.to(part.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        part, total = ctx.saved_tensors
        factor = (part / total).pow(ctx.p - 1) if total and ctx.p else torch.zeros_like(total)
        return (grad * factor).to(grad.dtype), None, None


def _norm(func: Any, x: Any = None, p: Any = None, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    """Return the p-norm of all elements, as torch.norm, Tensor.norm, torch.linalg.norm and torch.linalg.vector_norm compute it."""
    dtype, p = more.pop("dtype", None), more.pop("ord", p)
    of_matrix = func is torch.linalg.norm and p is not None
    if not isinstance(x, Part) or dim is not None or keepdim or more or p == "nuc" or (of_matrix and x.dim() > 1):
        return NotImplemented
    p = 2.0 if p is None or p == "fro" else float(p)
    with private.as_base_tensor():
        if p in (inf, -inf):
            return extreme(x.full.groups, p == inf, x.as_subclass(Tensor).to(dtype or x.dtype).abs())
        local = torch.linalg.vector_norm(x.as_subclass(Tensor), p, dtype=dtype)
        return _Norm.apply(local, x.full.groups, p)  # type: ignore[no-untyped-call]


def _norms(func: Any, xs: Sequence[Tensor], ord: Any = 2, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, sharded or not."""
    return tuple(torch.linalg.vector_norm(x, float(ord), **kwargs) for x in xs)


def _unscaled(func: Any, gradients: list[Tensor], found_inf: Tensor, *scale: Tensor) -> None:
    """Unscale float16 gradients and share `found_inf`, so that all ranks skip the step if one rank found an infinity."""
    groups = {group.ranks: group for x in gradients if isinstance(x, Part) for group in x.full.groups}
    with private.as_base_tensor():
        private.unscale(gradients, found_inf, *scale)
        for group in groups.values():
            group.all_reduce(found_inf, op="max")


def _extreme(largest: bool) -> Callable[..., Any]:
    def replacement(func: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Part) or args or kwargs:
            return NotImplemented
        with private.as_base_tensor():
            return extreme(x.full.groups, largest, x.as_subclass(Tensor))

    return replacement


def _extreme_over(largest: bool) -> Callable[..., Any]:
    """Build `amax` or `amin`, over all dimensions or some."""
    all_of = _extreme(largest)

    def replacement(func: Any, x: Any = None, dim: Any = (), keepdim: bool = False, **more: Any) -> Any:
        dims = [d % x.dim() for d in (dim if isinstance(dim, Iterable) else [dim])] if isinstance(x, Part) else []
        if not dims and not keepdim:
            return all_of(func, x, **more)
        groups = [group for form, group in x.full.cuts if form.dim in dims] if dims else []
        if more or len(groups) != len(x.full.groups):  # none (the factor rule covers it), or only some
            return NotImplemented
        with private.as_base_tensor():
            return extreme(tuple(groups), largest, x.as_subclass(Tensor), dims, keepdim)

    return replacement


def _truth(any_of: bool) -> Callable[..., Any]:
    def replacement(func: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Part) or args or kwargs:
            return NotImplemented
        with private.as_base_tensor():
            local = (torch.any if any_of else torch.all)(x.as_subclass(Tensor))
            result = local.to(torch.int64)
            for group in x.full.groups:
                group.all_reduce(result, op="max" if any_of else "min")
            return result.to(local.dtype)

    return replacement


def _compared(compare: Callable[..., Tensor]) -> Callable[..., Any]:
    """Compare full tensors. A plain tensor of the local shape is compared with this rank's shard only."""

    def replacement(func: Any, x: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
        shapes = [tensor.full.shape if isinstance(tensor, Part) else tuple(tensor.shape) for tensor in (x, other)]
        if shapes[0] == shapes[1]:
            return bool(compare(x, other, *args, **kwargs).all())
        with private.as_base_tensor():
            has_local_shape = tuple(x.shape) == tuple(other.shape) and not (isinstance(x, Part) and isinstance(other, Part))
            return has_local_shape and bool(func(x, other, *args, **kwargs))

    return replacement


def _grad(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `torch.autograd.grad`: the gradient with respect to a shard is a shard. The property of this name is not replaced."""
    if func is not torch.autograd.grad:
        return NotImplemented
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs_list = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    with private.as_base_tensor():
        gradients = func(*args, **kwargs)
    return tuple(x.full.of(g) if isinstance(x, Part) and g is not None else g for g, x in zip(gradients, inputs_list, strict=True))


def _hook(func: Any, x: Any, hook: Callable[[Tensor], Any]) -> Any:
    """Register a hook that receives a shard's gradient as a shard."""
    with private.as_base_tensor():
        return func(x, lambda grad: hook(x.full.of(grad)))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "norm": _norm,
    "linalg_norm": _norm,
    "linalg_vector_norm": _norm,
    "frobenius_norm": _norm,
    private.FOREACH_NORM: _norms,
    private.unscale.__name__: _unscaled,
    "max": _extreme(True),
    "min": _extreme(False),
    "amax": _extreme_over(True),
    "amin": _extreme_over(False),
    "any": _truth(True),
    "all": _truth(False),
    "equal": _compared(torch.eq),
    "allclose": _compared(torch.isclose),
    "grad": _grad,
    "register_hook": _hook,
}
