"""Global reductions of sharded tensors that factor rules do not express: norms, extremes, any and all.

Each function replaces a torch function called on a shard (`run/loop/sharded_tensor`) and returns the full tensor's result on every rank,
with its gradient, or `NotImplemented` for calls that are left to the factor rules. Every rank calls it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.kernels.second_derivatives import refuse_second_derivatives
from shardwise.lower.kernels.sharded_dims import sharded_extreme
from shardwise.world import private
from shardwise.world.world import Group

_AUTOGRAD_GRAD = inspect.unwrap(torch.autograd.grad)  # as torch passes it; `run/gradients/outside_parameters` wraps the name


class ShardedTensorBase(Tensor):
    """A shard of the tensor that `spec` describes: its placements and the groups of the other shards; see `run/loop/sharded_tensor`."""

    spec: Any


class _AllReduceShare(torch.autograd.Function):
    """All-reduce of the ranks' tensors, each times its share, in a wider dtype; every rank gets the sum's gradient times its share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, group: Group) -> Tensor:
        ctx.share = share
        total = x.detach().to(_accumulation_dtype(x), copy=True, memory_format=torch.contiguous_format)
        if share != 1.0:
            total *= share
        group.all_reduce(total)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.share, None, None


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else torch.int64


def all_reduce_share(x: Tensor, share: float, group: Group) -> Tensor:
    """Return the sum over ranks of `x` times `share`, on every rank."""
    total: Tensor = _AllReduceShare.apply(x, share, group)  # type: ignore[no-untyped-call]
    return total


class _GlobalNorm(torch.autograd.Function):
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
    @refuse_second_derivatives("the norm of a weight", "tensor or zero")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        part, total = ctx.saved_tensors
        factor = (part / total).pow(ctx.p - 1) if total and ctx.p else torch.zeros_like(total)
        return (grad * factor).to(grad.dtype), None, None


def _global_norm(func: Any, x: Any = None, p: Any = None, dim: Any = None, keepdim: bool = False, **more: Any) -> Any:
    """Return the p-norm of all elements, as torch.norm, Tensor.norm, torch.linalg.norm and torch.linalg.vector_norm compute it."""
    dtype, p = more.pop("dtype", None), more.pop("ord", p)
    of_matrix = func is torch.linalg.norm and p is not None
    if not isinstance(x, ShardedTensorBase) or dim is not None or keepdim or more or p == "nuc" or (of_matrix and x.dim() > 1):
        return NotImplemented
    p = 2.0 if p is None or p == "fro" else float(p)
    with private.as_base_tensor():
        if p in (inf, -inf):
            return sharded_extreme(x.spec.groups, p == inf, x.as_subclass(Tensor).to(dtype or x.dtype).abs())
        local = torch.linalg.vector_norm(x.as_subclass(Tensor), p, dtype=dtype)
        return _GlobalNorm.apply(local, x.spec.groups, p)  # type: ignore[no-untyped-call]


def _foreach_norm(func: Any, xs: Sequence[Tensor], ord: Any = 2, **kwargs: Any) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, sharded or not."""
    return tuple(torch.linalg.vector_norm(x, float(ord), **kwargs) for x in xs)


def _unscale_gradients(func: Any, gradients: list[Tensor], found_inf: Tensor, *scale: Tensor) -> None:
    """Unscale float16 gradients and share `found_inf`, so that all ranks skip the step if one rank found an infinity."""
    groups = {group.ranks: group for x in gradients if isinstance(x, ShardedTensorBase) for group in x.spec.groups}
    with private.as_base_tensor():
        private.unscale(gradients, found_inf, *scale)
        for group in groups.values():
            group.all_reduce(found_inf, op="max")


def _global_extreme(is_max: bool) -> Callable[..., Any]:
    def replacement(func: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, ShardedTensorBase) or args or kwargs:
            return NotImplemented
        with private.as_base_tensor():
            return sharded_extreme(x.spec.groups, is_max, x.as_subclass(Tensor))

    return replacement


def _global_extreme_over_dims(is_max: bool) -> Callable[..., Any]:
    """Build `amax` or `amin`, over all dimensions or some."""
    all_of = _global_extreme(is_max)

    def replacement(func: Any, x: Any = None, dim: Any = (), keepdim: bool = False, **more: Any) -> Any:
        dims = [d % x.dim() for d in (dim if isinstance(dim, Iterable) else [dim])] if isinstance(x, ShardedTensorBase) else []
        if not dims and not keepdim:
            return all_of(func, x, **more)
        groups = [group for form, group in x.spec.placements if form.dim in dims] if dims else []
        if more or len(groups) != len(x.spec.groups):  # none (the factor rule covers it), or only some
            return NotImplemented
        with private.as_base_tensor():
            return sharded_extreme(tuple(groups), is_max, x.as_subclass(Tensor), dims, keepdim)

    return replacement


def _global_any_or_all(is_any: bool) -> Callable[..., Any]:
    def replacement(func: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, ShardedTensorBase) or args or kwargs:
            return NotImplemented
        with private.as_base_tensor():
            local = (torch.any if is_any else torch.all)(x.as_subclass(Tensor))
            result = local.to(torch.int64)
            for group in x.spec.groups:
                group.all_reduce(result, op="max" if is_any else "min")
            return result.to(local.dtype)

    return replacement


def _compare_globally(compare: Callable[..., Tensor]) -> Callable[..., Any]:
    """Compare full tensors. A plain tensor of the local shape is compared with this rank's shard only."""

    def replacement(func: Any, x: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
        shapes = [tensor.spec.global_shape if isinstance(tensor, ShardedTensorBase) else tuple(tensor.shape) for tensor in (x, other)]
        if shapes[0] == shapes[1]:
            return bool(compare(x, other, *args, **kwargs).all())
        with private.as_base_tensor():
            has_local_shape = tuple(x.shape) == tuple(other.shape) and not (
                isinstance(x, ShardedTensorBase) and isinstance(other, ShardedTensorBase)
            )
            return has_local_shape and bool(func(x, other, *args, **kwargs))

    return replacement


def _grad_of_shards(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `torch.autograd.grad`: the gradient with respect to a shard is a shard. The property of this name is not replaced."""
    if func is not _AUTOGRAD_GRAD:
        return NotImplemented
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs_list = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    with private.as_base_tensor():
        gradients = func(*args, **kwargs)
    return tuple(
        x.spec.as_shard(g) if isinstance(x, ShardedTensorBase) and g is not None else g for g, x in zip(gradients, inputs_list, strict=True)
    )


def _register_hook(func: Any, x: Any, hook: Callable[[Tensor], Any]) -> Any:
    """Register a hook that receives a shard's gradient as a shard."""
    with private.as_base_tensor():
        return func(x, lambda grad: hook(x.spec.as_shard(grad)))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "norm": _global_norm,
    "linalg_norm": _global_norm,
    "linalg_vector_norm": _global_norm,
    "frobenius_norm": _global_norm,
    private.FOREACH_NORM: _foreach_norm,
    private.unscale.__name__: _unscale_gradients,
    "max": _global_extreme(True),
    "min": _global_extreme(False),
    "amax": _global_extreme_over_dims(True),
    "amin": _global_extreme_over_dims(False),
    "any": _global_any_or_all(True),
    "all": _global_any_or_all(False),
    "equal": _compare_globally(torch.eq),
    "allclose": _compare_globally(torch.isclose),
    "grad": _grad_of_shards,
    "register_hook": _register_hook,
}
