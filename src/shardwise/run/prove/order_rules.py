"""Rules of torch's operators on `FieldTensor`s that depend on the order of numbers: comparisons, extremes, sorting, choice."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import finite_field as field
from shardwise.run.prove.degrees import LINEAR
from shardwise.run.prove.field_tensor import (
    FieldTensor,
    aten,
    degree_of,
    have_own_exponents,
    hidden_or_none,
    keep_exponents,
    lift_constants,
    random_numbers,
    register_for,
    signed_order,
)
from shardwise.run.prove.rules import apply_function


@register_for(aten.amax, aten.amin)
def _apply_extreme(func: Any, x: FieldTensor, dim: Any = (), keepdim: bool = False) -> Any:
    dims = [d % x.dim() for d in (dim if isinstance(dim, list | tuple) else [dim]) if x.dim()] or list(range(x.dim()))
    out: Any = x
    for d in sorted(dims, reverse=True):
        order = signed_order(out)
        index = order.argmax(d, True) if func.overloadpacket is aten.amax else order.argmin(d, True)
        out = out.gather(d, index)
    for d in sorted(dims, reverse=True):
        out = out if keepdim else out.squeeze(d)
    return keep_exponents(out)


@register_for(aten.max, aten.min, aten.sort, aten.topk)
def _select_by_order(func: Any, x: FieldTensor, *args: Any, **kwargs: Any) -> Any:
    if func.overloadpacket in (aten.max, aten.min) and not args and not kwargs:
        return (aten.amax if func.overloadpacket is aten.max else aten.amin)(x)
    if args and isinstance(args[0], Tensor):
        return (aten.maximum if func.overloadpacket is aten.max else aten.minimum)(x, args[0])
    _, index = func(signed_order(x), *args, **kwargs)
    dim = kwargs.get("dim", args[1] if func.overloadpacket is aten.topk and len(args) > 1 else -1)
    if func.overloadpacket in (aten.max, aten.min):
        dim, keepdim = kwargs.get("dim", args[0] if args else 0), kwargs.get("keepdim", len(args) > 1 and args[1])
        values: Any = x.gather(dim, index if keepdim else index.unsqueeze(dim))
        return keep_exponents(values if keepdim else values.squeeze(dim)), index
    if func.overloadpacket is aten.sort and "dim" not in kwargs:
        dim = next((value for value in args if isinstance(value, int) and not isinstance(value, bool)), -1)
    return x.gather(dim, index), index


@register_for(aten.median.dim, aten.nanmedian.dim, aten.mode, aten.kthvalue, aten.cummax, aten.cummin)
def _gather_by_order(func: Any, x: FieldTensor, *args: Any, **kwargs: Any) -> Any:
    """Return the numbers that an operator takes along a dimension, and where they were."""
    position = 1 if func.overloadpacket is aten.kthvalue else 0
    dim = kwargs.get("dim", args[position] if len(args) > position else -1)
    keepdim = kwargs.get("keepdim", args[position + 1] if len(args) > position + 1 else func.overloadpacket in (aten.cummax, aten.cummin))
    _, index = func(signed_order(x), *args, **kwargs)
    values: Any = x.gather(dim, index if keepdim else index.unsqueeze(dim))
    return keep_exponents(values if keepdim else values.squeeze(dim)), index


@register_for(aten.median.default, aten.nanmedian.default)
def _choose_median(func: Any, x: FieldTensor) -> Any:
    return _gather_by_order(func.overloadpacket.dim, x.reshape(-1), 0)[0]


@register_for(aten.argmax, aten.argmin, aten.argsort)
def _index_by_order(func: Any, x: FieldTensor, *args: Any, **kwargs: Any) -> Any:
    return func(signed_order(x), *args, **kwargs)


@register_for(aten.maximum, aten.minimum)
def _keep_extreme(func: Any, x: Any, y: Any) -> Any:
    return keep_exponents(_choose_extreme(func, x, y))


def _choose_extreme(func: Any, x: Any, y: Any) -> Any:
    x, y = lift_constants(x), lift_constants(y)
    first = signed_order(x) >= signed_order(y) if func.overloadpacket is aten.maximum else signed_order(x) <= signed_order(y)
    return torch.where(first, x, y)


@register_for(aten.lt, aten.gt, aten.le, aten.ge, aten.eq, aten.ne)
def _apply_compare(func: Any, x: Any, y: Any) -> Any:
    return func.overloadpacket(signed_order(lift_constants(x)), signed_order(lift_constants(y)))


@register_for(aten.isnan, aten.isinf, aten.isfinite)
def _apply_classify(func: Any, x: FieldTensor) -> Any:
    name = func.overloadpacket.__name__
    return hidden_or_none(x) if name == "isinf" else torch.full(x.shape, name == "isfinite") & ~(hidden_or_none(x) & (name == "isfinite"))


@register_for(aten.where)
def _apply_where(func: Any, condition: Tensor, x: Any, y: Any) -> Any:
    x, y = lift_constants(_drop_infinite(x, ~condition)), lift_constants(_drop_infinite(y, condition))
    hidden = None
    if x.hidden is not None or y.hidden is not None:
        hidden = torch.where(condition, hidden_or_none(x), hidden_or_none(y))
    owns = have_own_exponents(x, y)
    return FieldTensor(torch.where(condition, x.a, y.a), torch.where(condition, x.b, y.b) if owns else None, hidden)


def _drop_infinite(x: Any, is_dropped: Tensor) -> Any:
    """Return constants with zero in place of what is no number and is not taken anywhere. NaN alone, which the logarithm of a determinant
    is where that is negative, is a random number."""
    if isinstance(x, FieldTensor) or (isinstance(x, Tensor) and not x.is_floating_point()):
        return x
    values = torch.as_tensor(x, dtype=torch.float64)
    is_wrong = values.isnan() | (values == torch.inf)
    if not bool(is_wrong.any()):
        return x
    if not bool((is_dropped | ~is_wrong).all()):
        return random_numbers((), "not a number", 0) if not values.dim() and values.isnan() else x
    return torch.where(is_wrong, 0.0, values)


@register_for(aten.masked_fill)
def _fill_masked(func: Any, x: FieldTensor, mask: Tensor, value: Any) -> Any:
    return torch.where(mask, lift_constants(value), x)


@register_for(aten.relu)
def _apply_rectify(func: Any, x: FieldTensor) -> Any:
    return torch.where(signed_order(x) > 0, x, 0.0)


@register_for(aten.threshold_backward)
def _rectify_backward(func: Any, gradient: FieldTensor, x: FieldTensor, threshold: float) -> Any:
    return torch.where(signed_order(x) > 0, gradient, 0.0)


@register_for(aten.leaky_relu)
def _leak_negative(func: Any, x: FieldTensor, slope: float = 0.01) -> Any:
    """Return a random negative number where `x` is negative: its sign is that of `x`, as backward of one in place needs."""
    negative = field.negative_number(field.random_function(f"leaky_relu {slope}", x.a))
    return FieldTensor(torch.where(signed_order(x) >= 0, x.a, negative), degree=[degree_of(x) | LINEAR])


@register_for(aten.leaky_relu_backward)
def _leak_backward(func: Any, gradient: FieldTensor, x: FieldTensor, slope: float, is_result: bool) -> Any:
    return torch.where(signed_order(x) > 0, gradient, gradient * slope)


@register_for(aten.elu)
def _apply_elu(func: Any, x: FieldTensor, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    return apply_function(f"elu {alpha} {scale} {input_scale}", x)


@register_for(aten.elu_backward)
def _elu_backward(func: Any, gradient: Any, alpha: float, scale: float, input_scale: float, is_result: bool, x: FieldTensor) -> Any:
    """Return the gradient, which is a function of the result, since one in place keeps nothing else."""
    result = x if is_result else apply_function(f"elu {alpha} {scale} {input_scale}", x)
    return gradient * apply_function(f"elu' {alpha} {scale} {input_scale}", result)


@register_for(aten.abs)
def _apply_absolute(func: Any, x: FieldTensor) -> Any:
    return torch.where(signed_order(x) < 0, -x, x)


@register_for(aten.sign, aten.sgn)
def _apply_sign(func: Any, x: FieldTensor) -> Any:
    return lift_constants(signed_order(x).sign())


@register_for(aten.clamp, aten.clamp_min, aten.clamp_max)
def _apply_clamp(func: Any, x: Any, *bounds: Any, min: Any = None, max: Any = None) -> Any:
    name = func.overloadpacket.__name__
    low = min if min is not None else bounds[0] if bounds and name != "clamp_max" else None
    high = max if max is not None else bounds[-1] if name == "clamp_max" else bounds[1] if len(bounds) > 1 else None
    low, high = (None if isinstance(bound, float) and bound == limit else bound for bound, limit in ((low, -math.inf), (high, math.inf)))
    out: Any = lift_constants(x)
    out = out if low is None else _choose_extreme(aten.maximum.default, out, low)
    return out if high is None else _choose_extreme(aten.minimum.default, out, high)
