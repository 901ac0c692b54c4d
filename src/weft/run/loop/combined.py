"""Numbers of a whole tensor from its parts where a factor rule has no word for it: norms, extremes, whether any or all.

In: a call of a function of torch's on a part (`run/loop/cut`). Out: what it gives of the whole on every rank, with its gradient;
`NotImplemented` where this call of it is another matter, for which rules are asked. Every rank calls it.
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
    """A part of what `full` says: which `groups` hold the other parts, along which dimensions (`cuts`); see `run/loop/cut`."""

    full: Any


class _Summed(torch.autograd.Function):
    """What ranks have, each times its share, added up in a wider dtype; each has the sum's gradient."""

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
    """The sum over ranks of `x` times `share`, on each of them."""
    total: Tensor = _Summed.apply(x, share, group)  # type: ignore[no-untyped-call]
    return total


class _Norm(torch.autograd.Function):
    """The norm of a whole from its parts' norms."""

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
    """The p-norm of all elements, as torch.norm, Tensor.norm, torch.linalg.norm and torch.linalg.vector_norm give it."""
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
    """The norm of each, whole or part."""
    return tuple(torch.linalg.vector_norm(x, float(ord), **kwargs) for x in xs)


def _unscaled(func: Any, gradients: list[Tensor], found_inf: Tensor, *scale: Tensor) -> None:
    """Unscales gradients of float16, for all ranks to skip the step together where one has found what is not finite."""
    groups = {group.ranks: group for x in gradients if isinstance(x, Part) for group in x.full.groups}
    with private.as_base_tensor():
        private.unscale(gradients, found_inf, *scale)
        for group in groups.values():
            group.all_reduce(found_inf, op="max")


def _extreme(largest: bool) -> Callable[..., Any]:
    def found(func: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Part) or args or kwargs:
            return NotImplemented
        with private.as_base_tensor():
            return extreme(x.full.groups, largest, x.as_subclass(Tensor))

    return found


def _extreme_over(largest: bool) -> Callable[..., Any]:
    """`amax` and `amin`, over all dimensions or some."""
    all_of = _extreme(largest)

    def found(func: Any, x: Any = None, dim: Any = (), keepdim: bool = False, **more: Any) -> Any:
        dims = [d % x.dim() for d in (dim if isinstance(dim, Iterable) else [dim])] if isinstance(x, Part) else []
        if not dims and not keepdim:
            return all_of(func, x, **more)
        over = [group for form, group in x.full.cuts if form.dim in dims] if dims else []
        if more or len(over) != len(x.full.groups):  # none, or some: the rule knows the former
            return NotImplemented
        with private.as_base_tensor():
            return extreme(tuple(over), largest, x.as_subclass(Tensor), dims, keepdim)

    return found


def _truth(any_of: bool) -> Callable[..., Any]:
    def found(func: Any, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Part) or args or kwargs:
            return NotImplemented
        with private.as_base_tensor():
            local = (torch.any if any_of else torch.all)(x.as_subclass(Tensor))
            told = local.to(torch.int64)
            for group in x.full.groups:
                group.all_reduce(told, op="max" if any_of else "min")
            return told.to(local.dtype)

    return found


def _compared(compare: Callable[..., Tensor]) -> Callable[..., Any]:
    """Whether wholes are the same. What is as large as a part, and no part itself, is held against this rank's alone."""

    def found(func: Any, x: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:
        shapes = [one.full.shape if isinstance(one, Part) else tuple(one.shape) for one in (x, other)]
        if shapes[0] == shapes[1]:
            return bool(compare(x, other, *args, **kwargs).all())
        with private.as_base_tensor():
            alone = tuple(x.shape) == tuple(other.shape) and not (isinstance(x, Part) and isinstance(other, Part))
            return alone and bool(func(x, other, *args, **kwargs))

    return found


def _grad(func: Any, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad`: the gradient by a part is a part. The property of this name is left alone."""
    if func is not torch.autograd.grad:
        return NotImplemented
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs_list = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    with private.as_base_tensor():
        gradients = func(*args, **kwargs)
    return tuple(x.full.of(g) if isinstance(x, Part) and g is not None else g for g, x in zip(gradients, inputs_list, strict=True))


def _hook(func: Any, x: Any, hook: Callable[[Tensor], Any]) -> Any:
    """A hook sees a part's gradient as a part."""
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
