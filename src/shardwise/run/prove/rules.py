"""Rules of torch's operators on `FieldTensor`s: structure, arithmetic, comparisons, and functions that are not rational."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import finite_field as field
from shardwise.run.prove.field_tensor import (  # fmt: skip
    CERTAINTY,
    RULES,
    FieldTensor,
    NotProvable,
    aten,
    degree_of,
    exponents_of_constants,
    hidden_or_none,
    lift_constants,
    register_for,
    signed_order,
    write,
    zeros_of,
)
from shardwise.run.prove.finite_field import P, Q

_VIEWS = (aten.view, aten._unsafe_view, aten._reshape_alias)
_STRUCTURE = (
    *_VIEWS, aten.t, aten.transpose, aten.permute, aten.expand, aten.slice, aten.select, aten.unsqueeze, aten.squeeze, aten.clone,
    aten.alias, aten.detach, aten.index, aten.gather, aten.index_select, aten.repeat, aten.roll, aten.flip, aten.unfold, aten.diagonal,
    aten.as_strided, aten.split, aten.split_with_sizes, aten.unbind, aten.tril, aten.triu, aten.slice_backward, aten.select_backward,
    aten.diagonal_backward, aten.select_scatter, aten.slice_scatter, aten.pixel_shuffle, aten.pixel_unshuffle, aten.take,
)  # fmt: skip
# As with real numbers: f'(x) is another random function of x. relu, abs, clamp and others follow from comparisons.
_FUNCTIONS = ("gelu", "tanh", "sigmoid", "erf", "erfc", "sin", "cos", "tan", "log1p", "expm1", "mish", "silu", "softplus", "elu", "atan")
_TANH_LIKE = {"tanh_backward", "sigmoid_backward"}  # get the result


def apply_function(name: str, x: FieldTensor) -> FieldTensor:
    """Return a function that is not rational: a random one of that name."""
    CERTAINTY.num_functions += 1
    return FieldTensor(field.random_function(name, x.a), degree=[1])


def _apply_to_components(x: FieldTensor, f: Callable[[Tensor], Any]) -> Any:
    """Apply a function of structure to each component; views share their buffer's degree."""
    parts = [f(x.a), f(x.b), None if x.hidden is None else f(x.hidden)]
    if isinstance(parts[0], Tensor):
        return _with_square(FieldTensor(parts[0], parts[1], parts[2], x.degree), x, f)
    return [
        FieldTensor(a, b, hidden, x.degree) for a, b, hidden in zip(parts[0], parts[1], parts[2] or [None] * len(parts[0]), strict=True)
    ]


def _with_square(out: FieldTensor, x: FieldTensor, f: Callable[[Tensor], Any]) -> Any:
    if x.root_of is not None:
        out.root_of = _apply_to_components(x.root_of, f)
    return out


@register_for(*_STRUCTURE)
def _apply_structure(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("memory_format", None)
    if not isinstance(x, FieldTensor):
        raise NotProvable(f"{func} by computed indices has no exact form")
    if func is aten.view.dtype:
        return x.a.view(args[0])  # its bits, as checksums read them: a function of the number
    if func.overloadpacket in _VIEWS:
        return _apply_to_components(x, lambda part: part.reshape(args[0]))  # a copy only where real numbers would lie otherwise in memory
    if any(isinstance(value, FieldTensor) for value in args):  # a tensor that is written into a part of this one
        parts = [[getattr(value, key) if isinstance(value, FieldTensor) else value for value in (x, *args)] for key in ("a", "b")]
        return FieldTensor(func(*parts[0], **kwargs), func(*parts[1], **kwargs))
    return _apply_to_components(x, lambda part: func(part, *args, **kwargs))


@register_for(aten._to_copy)
def _apply_cast(func: Any, x: FieldTensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        raise NotProvable("a computed number is rounded to a whole one")
    return _apply_to_components(x, torch.clone)


@register_for(aten._local_scalar_dense)
def _as_number(func: Any, x: FieldTensor) -> float:
    return float(x.a)


@register_for(aten.is_same_size)
def _is_same_size(func: Any, x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape


@register_for(aten.cat, aten.stack)
def _apply_join(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    if func.overloadpacket is aten.cat:
        tensors = [x for x in tensors if tuple(x.shape) != (0,)] or tensors[:1]
    parts = [lift_constants(x) for x in tensors]
    hidden = func([hidden_or_none(x) for x in parts], dim) if any(x.hidden is not None for x in parts) else None
    out = FieldTensor(func([x.a for x in parts], dim), func([x.b for x in parts], dim), hidden)
    if all(x.root_of is not None for x in parts):
        out.root_of = _apply_join(func, [x.root_of for x in parts], dim)
    return out


@register_for(aten.add)
def add_numbers(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    x, y = lift_constants(x), lift_constants(y)
    if alpha != 1:
        y = y * alpha
    hidden = None
    if x.hidden is not None or y.hidden is not None:
        hidden = hidden_or_none(x) | hidden_or_none(y)
    return FieldTensor((x.a + y.a) % P, (x.b + y.b) % Q, hidden)


@register_for(aten.sub)
def _apply_subtract(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    y = lift_constants(y)
    if y.hidden is not None and bool(y.hidden.any()):  # -inf - (-inf) of a row that is all hidden: the kernels then take 0
        y = FieldTensor(y.a, y.b)
    return add_numbers(func, x, -y, alpha)


@register_for(aten.rsub)
def _subtract_from(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return lift_constants(y) - lift_constants(x) * alpha


@register_for(aten.neg)
def _apply_negate(func: Any, x: FieldTensor) -> Any:
    return FieldTensor(-x.a % P, -x.b % Q, x.hidden)


@register_for(aten.mul)
def multiply_numbers(func: Any, x: Any, y: Any) -> Any:
    x, y = lift_constants(x), lift_constants(y)
    is_scaling = not (degree_of(x) and degree_of(y))  # one is constant
    hidden = None
    if x.hidden is not None or y.hidden is not None:
        hidden = hidden_or_none(x) | hidden_or_none(y)
    # An exponent is no rational function of its number: it is renewed by products, so that only sums between them need equal exponents.
    return FieldTensor(x.a * y.a % P, x.b * y.b % Q if is_scaling else None, hidden, [degree_of(x) + degree_of(y)])


@register_for(aten.div)
def _apply_divide(func: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        raise NotProvable("a quotient of computed numbers is rounded")
    x, y = lift_constants(x), lift_constants(y)
    CERTAINTY.add_divisor(y)
    quotient = x.a * field.inverse_of(y.a) % P
    if not degree_of(x) and not degree_of(y):
        return FieldTensor(quotient, exponents_of_constants(quotient), degree=[0])
    return FieldTensor(quotient, degree=[degree_of(x) + (degree_of(y) > 0)])


@register_for(aten.reciprocal)
def _apply_reciprocal(func: Any, x: FieldTensor) -> Any:
    return _apply_divide(func, 1.0, x)


@register_for(aten.sqrt)
def _square_root(func: Any, x: FieldTensor) -> Any:
    out = apply_function("sqrt", x)
    out.root_of = x
    return out


@register_for(aten.rsqrt)
def _reciprocal_square_root(func: Any, x: FieldTensor) -> Any:
    out = _apply_divide(func, 1.0, x.sqrt())
    out.root_of = _apply_divide(func, 1.0, x)
    return out


@register_for(aten.linalg_vector_norm)
def _apply_norm(func: Any, x: FieldTensor, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if ord != 2:
        raise NotProvable(f"the norm of order {ord} has no exact form yet")
    squares = x.root_of if x.root_of is not None else x * x
    return (squares.sum() if dim is None else squares.sum(dim, keepdim)).sqrt()


@register_for(aten.pow)
def _apply_raise(func: Any, x: Any, exponent: Any) -> Any:
    if isinstance(exponent, FieldTensor) or not isinstance(x, FieldTensor):
        raise NotProvable("a power with a computed exponent has no exact form")
    if isinstance(exponent, Tensor):
        return FieldTensor(field.random_function("pow", x.a * 31 + lift_constants(exponent).a), degree=[1])
    if exponent == 0.5:
        return x.sqrt()
    if float(exponent).is_integer():
        if x.root_of is not None and exponent == 2:
            return x.root_of
        out: Any = lift_constants(1.0).expand(x.shape)
        for _ in range(abs(int(exponent))):
            out = out * x
        return out if exponent >= 0 else 1.0 / out
    return apply_function(f"pow {exponent}", x)


def _define_functions() -> None:
    for name in _FUNCTIONS:

        def apply_named(func: Any, x: FieldTensor, *args: Any, name: str = name, **kwargs: Any) -> FieldTensor:
            return apply_function(f"{name} {args} {sorted(kwargs.items())}", x)

        def apply_derivative(func: Any, gradient: Any, x: FieldTensor, *args: Any, name: str = name, **kwargs: Any) -> Any:
            args = tuple(x for x in args if not isinstance(x, Tensor))  # the result, which follows from x
            return multiply_numbers(func, gradient, apply_function(f"{name}' {args} {sorted(kwargs.items())}", x))

        if (operator := getattr(aten, name, None)) is not None:
            RULES[operator] = apply_named
        if (operator := getattr(aten, f"{name}_backward", None)) is not None:
            RULES[operator] = apply_derivative


_define_functions()


@register_for(aten.exp)
def take_exponential(func: Any, x: FieldTensor) -> Any:
    numbers = field.exponential_of(x.b)
    return FieldTensor(numbers if x.hidden is None else torch.where(x.hidden, 0, numbers), degree=[1])


@register_for(aten.log)
def take_logarithm(func: Any, x: FieldTensor) -> Any:
    exponent = field.logarithm_of(x.a)
    return FieldTensor(field.random_function("log", exponent), exponent, x.a == 0 if bool((x.a == 0).any()) else None, [1])


def matrix_product(x: FieldTensor, y: FieldTensor) -> Any:
    degree = [degree_of(x) + degree_of(y)]
    return FieldTensor(field.apply_bilinear(torch.matmul, x.a, y.a), field.apply_bilinear(torch.matmul, x.b, y.b, Q), degree=degree)


@register_for(aten.mm, aten.bmm, aten.matmul, aten.mv, aten.dot)
def _multiply_matrices(func: Any, x: Any, y: Any) -> Any:
    return matrix_product(lift_constants(x), lift_constants(y))


@register_for(aten.addmm, aten.addmv)
def _add_product(func: Any, c: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1, out: Any = None) -> Any:
    product = matrix_product(lift_constants(x), lift_constants(y)) * alpha
    total = product if beta == 0 else product + lift_constants(c) * beta
    return total if out is None else write(out, total)


RULES[aten.baddbmm] = _add_product


@register_for(aten.sum)
def _apply_sum(func: Any, x: FieldTensor, dim: Any = None, keepdim: bool = False, dtype: Any = None, out: Any = None) -> Any:
    dims = list(range(x.dim())) if dim is None or dim == [] else dim
    total = FieldTensor(x.a.sum(dims, keepdim) % P, x.b.sum(dims, keepdim) % Q) if x.dim() else FieldTensor(x.a.clone(), x.b.clone())
    return total if out is None else write(out, total)


@register_for(aten.mean)
def _apply_mean(func: Any, x: FieldTensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    total: Any = _apply_sum(func, x, dim, keepdim)
    return total / (x.numel() // max(1, total.numel()))


@register_for(aten.cumsum)
def _cumulative_sum(func: Any, x: FieldTensor, dim: int, dtype: Any = None) -> Any:
    return FieldTensor(x.a.cumsum(dim) % P, x.b.cumsum(dim) % Q)


@register_for(aten.amax, aten.amin)
def _apply_extreme(func: Any, x: FieldTensor, dim: Any = (), keepdim: bool = False) -> Any:
    dims = [d % x.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])] or list(range(x.dim()))
    out: Any = x
    for d in sorted(dims, reverse=True):
        order = signed_order(out)
        index = order.argmax(d, True) if func.overloadpacket is aten.amax else order.argmin(d, True)
        out = out.gather(d, index)
    for d in sorted(dims, reverse=True):
        out = out if keepdim else out.squeeze(d)
    return out


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
        return values if keepdim else values.squeeze(dim), index
    if func.overloadpacket is aten.sort and "dim" not in kwargs:
        dim = next((value for value in args if isinstance(value, int) and not isinstance(value, bool)), -1)
    return x.gather(dim, index), index


@register_for(aten.argmax, aten.argmin, aten.argsort)
def _index_by_order(func: Any, x: FieldTensor, *args: Any, **kwargs: Any) -> Any:
    return func(signed_order(x), *args, **kwargs)


@register_for(aten.maximum, aten.minimum)
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
    x, y = lift_constants(x), lift_constants(y)
    hidden = None
    if x.hidden is not None or y.hidden is not None:
        hidden = torch.where(condition, hidden_or_none(x), hidden_or_none(y))
    return FieldTensor(torch.where(condition, x.a, y.a), torch.where(condition, x.b, y.b), hidden)


@register_for(aten.masked_fill)
def _fill_masked(func: Any, x: FieldTensor, mask: Tensor, value: Any) -> Any:
    return torch.where(mask, lift_constants(value), x)


@register_for(aten.relu)
def _apply_rectify(func: Any, x: FieldTensor) -> Any:
    return torch.where(signed_order(x) > 0, x, 0.0)


@register_for(aten.threshold_backward)
def _rectify_backward(func: Any, gradient: FieldTensor, x: FieldTensor, threshold: float) -> Any:
    return torch.where(signed_order(x) > 0, gradient, 0.0)


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
    out: Any = lift_constants(x)
    out = out if low is None else _choose_extreme(aten.maximum.default, out, low)
    return out if high is None else _choose_extreme(aten.minimum.default, out, high)


@register_for(aten._softmax, aten._safe_softmax)
def _apply_softmax(func: Any, x: FieldTensor, dim: int, *rest: Any, **kwargs: Any) -> Any:
    numbers: Any = take_exponential(func, x)
    return numbers / numbers.sum(dim, True)


@register_for(aten._log_softmax)
def _log_softmax(func: Any, x: FieldTensor, dim: int, *rest: Any) -> Any:
    shifted: Any = x - _apply_extreme(
        aten.amax.default, x, [dim], True
    )  # as the ranks of a vocabulary do: a logarithm depends on the shift
    return shifted - shifted.exp().sum(dim, True).log()


@register_for(aten.logsumexp)
def _log_sum_exp(func: Any, x: FieldTensor, dim: Any, keepdim: bool = False) -> Any:
    return x.exp().sum(dim, keepdim).log()


@register_for(aten.scatter, aten.scatter_add, aten.index_add, aten.index_copy)
def _apply_scatter(
    func: Any, x: Any, dim: int, index: Tensor, source: Any = None, value: Any = None, alpha: float = 1, **kwargs: Any
) -> Any:
    x, source = lift_constants(x), lift_constants(value if source is None else source)
    if func.overloadpacket is aten.scatter and not source.dim():
        source = source.expand(index.shape)
    source = source if alpha == 1 else source * alpha
    operator = getattr(torch.ops.aten, func.overloadpacket.__name__)
    return FieldTensor(operator(x.a, dim, index, source.a) % P, operator(x.b, dim, index, source.b) % Q)


@register_for(aten.index_put, aten._unsafe_index_put)
def _apply_put(func: Any, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    x, values = lift_constants(x), lift_constants(values)
    put = torch.ops.aten.index_put
    return FieldTensor(put(x.a, indices, values.a, accumulate) % P, put(x.b, indices, values.b, accumulate) % Q)


@register_for(aten.embedding)
def _apply_embed(func: Any, weight: FieldTensor, index: Tensor, *rest: Any) -> Any:
    return FieldTensor(weight.a[index], weight.b[index])


@register_for(aten.embedding_dense_backward)
def _embed_backward(func: Any, gradient: FieldTensor, index: Tensor, num: int, padding: int, scale: bool) -> Any:
    if scale:
        raise NotProvable("scale_grad_by_freq of an embedding has no exact form yet")
    rows = gradient.reshape(-1, gradient.shape[-1])
    total = aten.index_add(zeros_of((num, gradient.shape[-1])), 0, index.reshape(-1), rows)
    if padding >= 0:
        total[padding] = 0.0
    return total


@register_for(aten.constant_pad_nd)
def _apply_pad(func: Any, x: FieldTensor, sizes: Sequence[int], value: float = 0) -> Any:
    if value in (0, 0.0):
        return _apply_to_components(x, lambda part: func(part, sizes, 0))
    inside = func(torch.ones(x.shape, dtype=torch.bool), sizes, False)
    return torch.where(inside, _apply_to_components(x, lambda part: func(part, sizes, 0)), lift_constants(value))


_FILLED = {aten.zeros_like: 0.0, aten.new_zeros: 0.0, aten.empty_like: 0.0, aten.new_empty: 0.0, aten.ones_like: 1.0, aten.new_ones: 1.0}


@register_for(*_FILLED, aten.full_like, aten.new_full, aten.new_empty_strided)
def _apply_allocate(func: Any, x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    operator = func.overloadpacket
    values = list(args)
    shape = tuple(x.shape) if operator.__name__.endswith("_like") else tuple(values.pop(0))
    value = values[0] if operator in (aten.full_like, aten.new_full) else _FILLED.get(operator, 0.0)
    if dtype is not None and not dtype.is_floating_point:
        return torch.full(shape, value, dtype=dtype)
    return _apply_to_components(lift_constants(float(value)), lambda part: part.expand(shape).clone())


@register_for(aten.copy_)
def _apply_copy(func: Any, target: Tensor, source: Any, *rest: Any) -> Any:
    return write(target, source)


@register_for(aten.zero_)
def _apply_zero(func: Any, x: FieldTensor) -> Any:
    return write(x, 0.0)


@register_for(aten.fill_, aten.fill)
def _apply_fill(func: Any, x: FieldTensor, value: Any) -> Any:
    return (
        write(x, value)
        if func.overloadpacket is aten.fill_
        else _apply_to_components(lift_constants(value), lambda part: part.expand(x.shape).clone())
    )


@register_for(aten.normal_, aten.uniform_, aten.random_)
def _apply_initialise(func: Any, x: FieldTensor, *args: Any, **kwargs: Any) -> Any:
    return x  # initial values are random numbers of the field, whatever distribution they have


@register_for(aten.addcmul)
def _add_elementwise_product(func: Any, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return lift_constants(x) + lift_constants(y) * z * value


@register_for(aten.addcdiv)
def _add_quotient(func: Any, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return lift_constants(x) + lift_constants(y) / z * value


@register_for(aten.lerp)
def _apply_interpolate(func: Any, x: Any, y: Any, weight: Any) -> Any:
    return lift_constants(x) + (lift_constants(y) - lift_constants(x)) * weight
