"""Rules of torch's operators on `FieldTensor`s: structure, arithmetic, and functions that are not rational."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import finite_field as field
from shardwise.run.prove.degrees import CERTAINTY, CONSTANT, LINEAR, Degree
from shardwise.run.prove.field_tensor import (  # fmt: skip
    RULES,
    FieldTensor,
    NotProvable,
    add_divisor,
    aten,
    degree_of,
    have_own_exponents,
    hidden_or_none,
    lift_complex,
    lift_constants,
    register_for,
    signed_order,
    write,
    zeros_of,
)
from shardwise.run.prove.finite_field import P, Q
from shardwise.run.prove.rounding_rules import cast_to_whole_numbers

VIEWS = (aten.view, aten._unsafe_view, aten._reshape_alias)
STRUCTURE = (
    aten.t, aten.transpose, aten.permute, aten.expand, aten.slice, aten.select, aten.unsqueeze, aten.squeeze, aten.clone,
    aten.alias, aten.detach, aten.index, aten.gather, aten.index_select, aten.repeat, aten.roll, aten.flip, aten.unfold, aten.diagonal,
    aten.as_strided, aten.split, aten.split_with_sizes, aten.unbind, aten.tril, aten.triu, aten.slice_backward, aten.select_backward,
    aten.diagonal_backward, aten.select_scatter, aten.slice_scatter, aten.diagonal_scatter, aten.as_strided_scatter,
    aten.pixel_shuffle, aten.pixel_unshuffle, aten.take,
)  # fmt: skip
_NARROWING = {aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.unbind}
# As with real numbers: f'(x) is another random function of x. relu, abs, clamp and others follow from comparisons.
_FUNCTIONS = ("gelu", "tanh", "sigmoid", "erf", "erfc", "sin", "cos", "tan", "log1p", "expm1", "mish", "silu", "softplus", "atan")
_TANH_LIKE = {"tanh_backward", "sigmoid_backward"}  # get the result


def apply_function(name: str, x: FieldTensor) -> FieldTensor:
    """Return a function that is not rational: a random one of that name."""
    CERTAINTY.num_functions += 1
    return FieldTensor(field.random_function(name, x.a), degree=[LINEAR])


def _apply_to_components(x: FieldTensor, f: Callable[[Tensor], Any]) -> Any:
    """Apply a function of structure to each component; views share their buffer's degree and exponents."""
    numbers = f(x.a)
    if isinstance(numbers, Tensor):
        if numbers.untyped_storage().data_ptr() == x.a.untyped_storage().data_ptr():
            out = view_of(x, numbers)
        else:
            degree = None if x.degree is None else [degree_of(x)]
            out = FieldTensor(numbers, f(x.b) if x.has_own_exponents else None, None if x.hidden is None else f(x.hidden), degree)
        if x.root_of is not None:
            out.root_of = _apply_to_components(x.root_of, f)
        if x.reciprocal_of is not None:
            out.reciprocal_of = _apply_to_components(x.reciprocal_of, f)
        return out
    return [view_of(x, part) for part in numbers]


def view_of(x: FieldTensor, numbers: Tensor) -> FieldTensor:
    """Return a tensor of some of the numbers of `x`, where they lie."""
    view = FieldTensor(numbers, degree=x.degree)
    view.own_exponents, view.hidden_numbers, view.part_degree = x.own_exponents, x.hidden_numbers, x.part_degree
    return view


def _square_of(x: FieldTensor) -> Any:
    """Return the exact square of a root, or of its reciprocal; None for other tensors."""
    inverse = x.reciprocal_of
    return _apply_divide(None, 1.0, inverse.root_of) if inverse is not None and inverse.root_of is not None else x.root_of


@register_for(*STRUCTURE)
def _apply_structure(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("memory_format", None)
    if not isinstance(x, FieldTensor):
        lift_constants(x)  # raises for a complex one, into which this is written
        raise NotProvable(f"{func} by computed indices has no exact form")
    args = tuple(lift_constants(value) if isinstance(value, Tensor) and value.is_floating_point() else value for value in args)
    if any(isinstance(value, FieldTensor) for value in args):  # a tensor that is written into a part of this one
        parts = [[getattr(value, key) if isinstance(value, FieldTensor) else value for value in (x, *args)] for key in ("a", "b")]
        owns = any(isinstance(value, FieldTensor) and value.has_own_exponents for value in (x, *args))
        source = next(value for value in args if isinstance(value, FieldTensor))
        degree = CERTAINTY.degree_after_write(degree_of(x), x.a, degree_of(source), source.a)
        hidden = _hidden_of(lambda *masks: func(masks[0], *[masks[1] if value is source else value for value in args], **kwargs), x, source)
        return FieldTensor(func(*parts[0], **kwargs), func(*parts[1], **kwargs) if owns else None, hidden, [degree])
    out = _apply_to_components(x, lambda part: func(part, *args, **kwargs))
    if func.overloadpacket in _NARROWING and degree_of(x).is_joined:
        for part in out if isinstance(out, list) else [out]:
            part.part_degree = (CERTAINTY.degree_of_part(part.a, degree_of(x)), part.degree[0])
    return out


@register_for(aten.view.dtype)
def _view_bits(func: Any, x: FieldTensor, dtype: torch.dtype) -> Tensor:
    return x.a.view(dtype)  # as checksums read them: a function of the number


@register_for(*VIEWS)
def _apply_view(func: Any, x: FieldTensor, shape: Sequence[int], *strides: Any) -> Any:
    return _apply_to_components(x, lambda part: part.reshape(shape))  # a copy only where real numbers would lie otherwise in memory


@register_for(aten.masked_select)
def _select_masked(func: Any, x: Any, mask: Tensor) -> Any:
    x, mask = aten.broadcast_tensors([lift_constants(x), mask])
    return x[mask]


@register_for(aten._to_copy)
def _apply_cast(func: Any, x: FieldTensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype is torch.bool:
        return signed_order(x) != 0
    if dtype is not None and dtype.is_complex:
        return lift_complex(x)
    if dtype is not None and not dtype.is_floating_point:
        return cast_to_whole_numbers(x, dtype)
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
    degree = CERTAINTY.join_degrees([(degree_of(x), x.a) for x in parts])
    owns = have_own_exponents(*parts)
    exponents = func([x.b for x in parts], dim) if owns else None
    out = FieldTensor(func([x.a for x in parts], dim), exponents, hidden, [degree])
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
    return _sum_of(x, y, hidden, 1)


def _sum_of(x: FieldTensor, y: FieldTensor, hidden: Tensor | None, sign: int) -> FieldTensor:
    owns = have_own_exponents(x, y)
    exponents = field.add_residues(x.b, y.b, Q, sign) if owns else None
    return FieldTensor(field.add_residues(x.a, y.a, P, sign), exponents, hidden)


@register_for(aten.sub)
def _apply_subtract(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    x, y = lift_constants(x), lift_constants(y)  # -inf - (-inf) of a row that is all hidden: the kernels then take 0
    return _sum_of(x, y if alpha == 1 else y * alpha, x.hidden, -1)


@register_for(aten.rsub)
def _subtract_from(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return lift_constants(y) - lift_constants(x) * alpha


@register_for(aten.neg)
def _apply_negate(func: Any, x: FieldTensor) -> Any:
    return FieldTensor(-x.a % P, -x.b % Q if x.has_own_exponents else None, x.hidden)


@register_for(aten.mul)
def multiply_numbers(func: Any, x: Any, y: Any) -> Any:
    x, y = lift_constants(x), lift_constants(y)
    # One is constant: exponents of their own are scaled with the number.
    is_scaling = not (degree_of(x).total and degree_of(y).total) and have_own_exponents(x, y)
    hidden = None
    if x.hidden is not None or y.hidden is not None:
        hidden = hidden_or_none(x) | hidden_or_none(y)
    return FieldTensor(
        field.multiply_residues(x.a, y.a),
        field.multiply_residues(x.b, y.b, Q) if is_scaling else None,
        hidden,
        [degree_of(x) + degree_of(y)],
    )


@register_for(aten.div)
def _apply_divide(func: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is not None:
        return getattr(_apply_divide(func, x, y), rounding_mode)()
    x, y = lift_constants(x), lift_constants(y)
    if y.reciprocal_of is None and not CERTAINTY.is_exact_divisor(degree_of(y)):
        CERTAINTY.zero_divisors += int((y.a == 0).sum())
        return multiply_numbers(func, x, apply_function("reciprocal", y))
    reciprocal = degree_of(y.reciprocal_of) if y.reciprocal_of is not None else add_divisor(y)
    quotient = field.multiply_residues(x.a, field.inverse_of(y.a))
    if not degree_of(x).total and not reciprocal.total:
        return FieldTensor(quotient, degree=[CONSTANT])
    out = FieldTensor(quotient, degree=[degree_of(x) + reciprocal])
    if not x.dim() and int(x.a) == 1:
        out.reciprocal_of = None if y.reciprocal_of is not None else y
        out.root_of = None if y.reciprocal_of is None else y.reciprocal_of.root_of
    return out


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
    return _apply_divide(func, 1.0, x.sqrt())


@register_for(aten.linalg_vector_norm)
def _apply_norm(func: Any, x: FieldTensor, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    dims = list(range(x.dim())) if dim is None else dim
    if ord == 2:
        squares = x * x if (square := _square_of(x)) is None else square
        return squares.sum(dims, keepdim).sqrt()
    sizes = x.abs()
    if math.isinf(ord):
        return sizes.amax(dims, keepdim) if ord > 0 else sizes.amin(dims, keepdim)
    return (x != 0).sum(dims, keepdim).double() if ord == 0 else (sizes**ord).sum(dims, keepdim) ** (1 / ord)


@register_for(aten.pow)
def _apply_raise(func: Any, x: Any, exponent: Any) -> Any:
    if isinstance(exponent, FieldTensor) or not isinstance(x, FieldTensor):
        raise NotProvable("a power with a computed exponent has no exact form")
    if isinstance(exponent, Tensor):
        return FieldTensor(field.random_function("pow", x.a * 31 + lift_constants(exponent).a), degree=[LINEAR])
    if exponent in (0.5, 1):
        return x.sqrt() if exponent == 0.5 else x.clone()
    if float(exponent).is_integer():
        if exponent == 2 and (square := _square_of(x)) is not None:
            return square
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
    return FieldTensor(numbers if x.hidden is None else torch.where(x.hidden, 0, numbers), degree=[degree_of(x).degree_of_exponential()])


@register_for(aten.log)
def take_logarithm(func: Any, x: FieldTensor) -> Any:
    exponent = field.logarithm_of(x.a)
    degree = Degree(1, logarithms=CERTAINTY.add_divisors(degree_of(x), x.numel()).reciprocals)  # an exponential of it less this divides
    hidden = x.a == 0 if bool((x.a == 0).any()) else None
    return FieldTensor(field.random_function("log", exponent), exponent, hidden, [degree])


def matrix_product(x: FieldTensor, y: FieldTensor) -> Any:
    return FieldTensor(field.multiply_matrices(x.a, y.a), degree=[degree_of(x) + degree_of(y)])


@register_for(aten.mm, aten.bmm, aten.matmul, aten.mv, aten.dot)
def _multiply_matrices(func: Any, x: Any, y: Any, out: Any = None) -> Any:
    product = matrix_product(lift_constants(x), lift_constants(y))
    return product if out is None else write(out, product)


@register_for(aten.addmm, aten.addmv)
def _add_product(func: Any, c: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1, out: Any = None) -> Any:
    product = matrix_product(lift_constants(x), lift_constants(y)) * alpha
    total = product if beta == 0 else product + lift_constants(c) * beta
    return total if out is None else write(out, total)


RULES[aten.baddbmm] = _add_product


@register_for(aten.addbmm)
def _add_sum_of_products(func: Any, c: Any, x: Any, y: Any, beta: float = 1, alpha: float = 1) -> Any:
    return _add_product(func, c, x.transpose(0, 1).flatten(1), y.flatten(0, 1), beta, alpha)


def _hidden_of(f: Callable[..., Tensor], *parts: FieldTensor) -> Tensor | None:
    """Return where the result of an operator that places or adds numbers is minus infinity."""
    if all(x.hidden is None for x in parts):
        return None
    return f(*(hidden_or_none(x).to(torch.int64) for x in parts)) > 0


def _apply_linear(f: Callable[..., Tensor], *parts: FieldTensor) -> FieldTensor:
    exponents = field.apply_linear(f, *(x.b for x in parts), modulus=Q) if have_own_exponents(*parts) else None
    return FieldTensor(field.apply_linear(f, *(x.a for x in parts)), exponents)


def _apply_placing(f: Callable[..., Tensor], *parts: FieldTensor) -> FieldTensor:
    """Return a linear function that places or adds numbers among others, which may be minus infinity."""
    out, hidden = _apply_linear(f, *parts), _hidden_of(f, *parts)
    if hidden is not None:
        out.hide(hidden)
    return out


@register_for(aten.sum)
def _apply_sum(func: Any, x: FieldTensor, dim: Any = None, keepdim: bool = False, dtype: Any = None, out: Any = None) -> Any:
    dims = list(range(x.dim())) if dim is None or dim == [] else dim
    exponents = field.sum_residues(x.b, dims, keepdim, Q) if x.has_own_exponents else None
    total = FieldTensor(field.sum_residues(x.a, dims, keepdim), exponents)
    return total if out is None else write(out, total)


@register_for(aten.mean)
def _apply_mean(func: Any, x: FieldTensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    total: Any = _apply_sum(func, x, dim, keepdim)
    return total / (x.numel() // max(1, total.numel()))


@register_for(aten.prod, aten.cumprod)
def _apply_product(func: Any, x: FieldTensor, dim: int | None = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Return products along a dimension, or of all numbers."""
    flat = x.reshape(-1) if dim is None else x.movedim(dim, 0)
    products: list[Any] = [flat[0]]
    for i in range(1, len(flat)):
        products.append(products[-1] * flat[i])
    if func.overloadpacket is aten.cumprod:
        return torch.stack(products, dim if dim is not None else 0)
    return products[-1].unsqueeze(dim) if keepdim and dim is not None else products[-1]


@register_for(aten.cumsum)
def _cumulative_sum(func: Any, x: FieldTensor, dim: int, dtype: Any = None) -> Any:
    return FieldTensor(field.apply_linear(lambda part: part.cumsum(dim), x.a))


@register_for(aten._softmax, aten._safe_softmax)
def _apply_softmax(func: Any, x: FieldTensor, dim: int, *rest: Any, **kwargs: Any) -> Any:
    numbers: Any = take_exponential(func, x)
    return numbers / numbers.sum(dim, True)


@register_for(aten._log_softmax)
def _log_softmax(func: Any, x: FieldTensor, dim: int, *rest: Any) -> Any:
    shifted: Any = x - x.amax(dim, True)  # as the ranks of a vocabulary do: a logarithm depends on the shift
    return shifted - shifted.exp().sum(dim, True).log()


@register_for(aten.logsumexp)
def _log_sum_exp(func: Any, x: FieldTensor, dim: Any, keepdim: bool = False) -> Any:
    return x.exp().sum(dim, keepdim).log()


@register_for(aten.scatter, aten.scatter_add, aten.index_add, aten.index_copy)
def _apply_scatter(
    func: Any, x: Any, dim: int, index: Tensor, source: Any = None, value: Any = None, alpha: float = 1, **kwargs: Any
) -> Any:
    x, source = lift_constants(x), lift_constants(value if source is None else source)
    scatters = func.overloadpacket is aten.scatter
    if scatters and not source.dim():
        source = source.expand(index.shape)
    source = source if alpha == 1 else source * alpha
    scatter = aten.scatter.src if scatters else func  # an overload that is looked for is found by errors, whose texts take milliseconds
    return _apply_placing(lambda t, s: scatter(t, dim, index, s), x, source)


@register_for(aten.index_put, aten._unsafe_index_put)
def _apply_put(func: Any, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    x, values = lift_constants(x), lift_constants(values)
    return _apply_placing(lambda t, s: torch.ops.aten.index_put(t, indices, s, accumulate), x, values)


@register_for(aten.embedding)
def _apply_embed(func: Any, weight: FieldTensor, index: Tensor, *rest: Any) -> Any:
    return FieldTensor(weight.a[index])


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
    if isinstance(weight, float):  # 1 - 0.9 is no short fraction, and 1 - (1 - 0.9) is 0.9 again, as fused updates have it
        return lift_constants(x) * (1 - weight) + lift_constants(y) * weight
    return lift_constants(x) + (lift_constants(y) - lift_constants(x)) * weight
