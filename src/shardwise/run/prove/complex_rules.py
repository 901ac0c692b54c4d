"""Rules of torch's operators on complex tensors of a finite field (`ComplexFieldTensor`), composed of rules of their real parts.

i is formal, so nothing depends on whether the field has a root of -1: both parts of a value are rational functions of real numbers.
Angles and exponentials have no rule; Fourier transforms are in `fourier_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove.field_tensor import (
    COMPLEX_RULES,
    ComplexFieldTensor,
    FieldTensor,
    NotProvable,
    aten,
    hidden_or_none,
    largest_degree,
    lift_complex,
    lift_constants,
    register_for,
    write,
    zeros_of,
)
from shardwise.run.prove.rules import STRUCTURE, VIEWS, view_of

register_complex = partial(register_for, rules=COMPLEX_RULES)


def join_parts(real: Any, imaginary: Any) -> ComplexFieldTensor:
    """Return complex numbers of real and imaginary parts."""
    parts: Any = torch.stack(aten.broadcast_tensors([lift_constants(real), lift_constants(imaginary)]), -1)
    return ComplexFieldTensor(parts)


def parts_of(z: Any) -> tuple[Any, Any]:
    """Return real and imaginary parts."""
    pair: Any = lift_complex(z).pair
    return pair[..., 0], pair[..., 1]


def _is_complex(x: Any) -> bool:
    return isinstance(x, complex) or (isinstance(x, Tensor) and x.is_complex())


def _as_bits(x: Any) -> Any:
    """Return the numbers of a complex tensor as the bits of torch's own complex numbers, which operators of structure only move."""
    if not isinstance(x, Tensor) or not _is_complex(x):
        return x
    pair = lift_complex(x).pair
    if bool(hidden_or_none(pair).any()):
        raise NotProvable("a complex number is infinite")
    bits = pair.a.view(torch.float64)  # numbers are below 2^62, so that none is NaN
    aligned = bits.stride(-1) == 1 and not bits.storage_offset() % 2 and not any(stride % 2 for stride in bits.stride()[:-1])
    return torch.view_as_complex(bits if aligned else bits.contiguous())


def _from_bits(z: Any, bits: Tensor, args: Sequence[Any]) -> ComplexFieldTensor:
    numbers = torch.view_as_real(bits).view(torch.int64)
    if isinstance(z, ComplexFieldTensor) and numbers.untyped_storage().data_ptr() == z.pair.a.untyped_storage().data_ptr():
        return ComplexFieldTensor(view_of(z.pair, numbers))
    return ComplexFieldTensor(FieldTensor(numbers, degree=[largest_degree((z, *args))]))


@register_complex(*VIEWS, *STRUCTURE)
def _apply_structure(func: Any, z: Any, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("memory_format", None)
    if func is aten.view.dtype:
        return z.pair.a.flatten(-2).view(args[0])  # its bits, as checksums read them
    call = (lambda bits, shape: bits.reshape(shape)) if func.overloadpacket in VIEWS else func
    out = call(_as_bits(z), *map(_as_bits, args), **kwargs)
    return _from_bits(z, out, args) if isinstance(out, Tensor) else [_from_bits(z, part, args) for part in out]


@register_complex(aten.cat, aten.stack)
def _apply_join(func: Any, tensors: Sequence[Any], dim: int = 0) -> Any:
    joined = func([_as_bits(lift_complex(x)) for x in tensors], dim)
    return _from_bits(None, joined, tuple(tensors))


@register_for(aten.view_as_complex)
def _view_as_complex(func: Any, pair: FieldTensor) -> Any:
    return ComplexFieldTensor(view_of(pair, pair.a))


@register_complex(aten.view_as_real)
def _view_as_real(func: Any, z: ComplexFieldTensor) -> Any:
    return view_of(z.pair, z.pair.a)


@register_for(aten.complex)
def _make_complex(func: Any, real: Any, imaginary: Any) -> Any:
    return join_parts(real, imaginary)


@register_for(aten.polar)
def _make_polar(func: Any, size: Any, angle: Any) -> Any:
    size, angle = lift_constants(size), lift_constants(angle)
    return join_parts(size * angle.cos(), size * angle.sin())


@register_complex(aten.add)
def _apply_add(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    y = y if alpha == 1 else aten.mul(y, alpha)
    return ComplexFieldTensor(lift_complex(x).pair + lift_complex(y).pair)  # type: ignore[arg-type]


@register_complex(aten.sub)
def _apply_subtract(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return _apply_add(func, x, _apply_negate(func, y if alpha == 1 else aten.mul(y, alpha)))


@register_complex(aten.rsub)
def _subtract_from(func: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
    return _apply_subtract(func, y, x, alpha)


@register_complex(aten.neg)
def _apply_negate(func: Any, z: Any) -> Any:
    return ComplexFieldTensor(-lift_complex(z).pair)  # type: ignore[arg-type]


def _scale_pairs(z: Any, factor: Any, divides: bool = False) -> ComplexFieldTensor:
    """Return complex numbers times or over real ones."""
    factor, pair = lift_constants(factor).unsqueeze(-1), lift_complex(z).pair
    return ComplexFieldTensor(pair / factor if divides else pair * factor)


def _combine_products(multiply: Callable[[Any, Any], Any], x: Any, y: Any) -> ComplexFieldTensor:
    """Return a bilinear function of complex numbers, given that of real ones."""
    (a, b), (c, d) = parts_of(x), parts_of(y)
    return join_parts(multiply(a, c) - multiply(b, d), multiply(a, d) + multiply(b, c))


@register_complex(aten.mul)
def _apply_multiply(func: Any, x: Any, y: Any) -> Any:
    if not _is_complex(x) or not _is_complex(y):
        return _scale_pairs(x, y) if _is_complex(x) else _scale_pairs(y, x)
    return _combine_products(lambda a, b: a * b, x, y)


@register_complex(aten.div)
def _apply_divide(func: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if not _is_complex(y):
        return _scale_pairs(x, y, divides=True)
    a, b = parts_of(y)
    return _scale_pairs(_apply_multiply(func, x, _take_conjugate(func, lift_complex(y))), a * a + b * b, divides=True)


@register_complex(aten.reciprocal)
def _apply_reciprocal(func: Any, z: Any) -> Any:
    return _apply_divide(func, 1.0, z)


@register_complex(aten._conj, aten._conj_physical, aten.conj_physical)
def _take_conjugate(func: Any, z: ComplexFieldTensor) -> Any:
    a, b = parts_of(z)
    return join_parts(a, -b)


@register_complex(aten.abs)
def _apply_absolute(func: Any, z: Any) -> Any:
    a, b = parts_of(z)
    return (a * a + b * b).sqrt()


@register_complex(aten.sgn)
def _apply_sign(func: Any, z: Any) -> Any:
    return _scale_pairs(z, _apply_absolute(func, z), divides=True)


@register_complex(aten.pow)
def _apply_raise(func: Any, z: Any, exponent: Any) -> Any:
    if not isinstance(exponent, int | float) or not float(exponent).is_integer():
        raise NotProvable("a power of complex numbers with an exponent that is not whole has no exact form")
    out: Any = lift_complex(1.0)
    for _ in range(abs(int(exponent))):
        out = _apply_multiply(func, out, z)
    return out if exponent >= 0 else _apply_reciprocal(func, out)


@register_complex(aten.square)
def _apply_square(func: Any, z: Any) -> Any:
    return _apply_multiply(func, z, z)


def _dims_of(z: Tensor, dim: Any) -> list[int]:
    return list(range(z.dim())) if dim is None or dim == [] else [d % z.dim() for d in (dim if isinstance(dim, list | tuple) else [dim])]


@register_complex(aten.sum)
def _apply_sum(func: Any, z: ComplexFieldTensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return ComplexFieldTensor(z.pair.sum(_dims_of(z, dim), keepdim) if z.dim() else z.pair.clone())  # type: ignore[arg-type]


@register_complex(aten.mean)
def _apply_mean(func: Any, z: ComplexFieldTensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    total = _apply_sum(func, z, dim, keepdim)
    return _scale_pairs(total, z.numel() // max(1, total.numel()), divides=True)


@register_complex(aten.cumsum)
def _cumulative_sum(func: Any, z: ComplexFieldTensor, dim: int, dtype: Any = None) -> Any:
    return ComplexFieldTensor(z.pair.cumsum(dim % z.dim()))  # type: ignore[arg-type]


@register_complex(aten.linalg_vector_norm)
def _apply_norm(func: Any, z: ComplexFieldTensor, ord: float = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return torch.linalg.vector_norm(z.pair, ord, [*_dims_of(z, dim), z.dim()], False) if not keepdim else _keep_norm(z, ord, dim)


def _keep_norm(z: ComplexFieldTensor, ord: float, dim: Any) -> Any:
    return torch.linalg.vector_norm(z.pair, ord, [*_dims_of(z, dim), z.dim()], True).squeeze(-1)


@register_complex(aten.mm, aten.bmm, aten.matmul, aten.mv, aten.dot)
def _multiply_matrices(func: Any, x: Any, y: Any, out: Any = None) -> Any:
    product = _combine_products(torch.matmul, x, y)
    return product if out is None else write(out, product)


@register_complex(aten.vdot)
def _multiply_conjugate(func: Any, x: Any, y: Any) -> Any:
    return _multiply_matrices(func, _take_conjugate(func, lift_complex(x)), y)


@register_complex(aten.addmm, aten.addmv, aten.baddbmm)
def _add_product(func: Any, c: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1, out: Any = None) -> Any:
    product: Any = _multiply_matrices(func, x, y)
    total = _apply_add(func, _apply_multiply(func, product, complex(alpha)), _apply_multiply(func, lift_complex(c), complex(beta)))
    return total if out is None else write(out, total)


@register_complex(aten.addcmul)
def _add_elementwise_product(func: Any, x: Any, y: Any, z: Any, value: Any = 1) -> Any:
    return _apply_add(func, x, _apply_multiply(func, _apply_multiply(func, lift_complex(y), z), value))


@register_complex(aten.where)
def _apply_where(func: Any, condition: Tensor, x: Any, y: Any) -> Any:
    return ComplexFieldTensor(torch.where(condition.unsqueeze(-1), lift_complex(x).pair, lift_complex(y).pair))  # type: ignore[arg-type]


@register_complex(aten.masked_fill)
def _fill_masked(func: Any, z: Any, mask: Tensor, value: Any) -> Any:
    return _apply_where(func, mask, value, z)


@register_complex(aten.eq, aten.ne)
def _apply_compare(func: Any, x: Any, y: Any) -> Any:
    equal = (lift_complex(x).pair == lift_complex(y).pair).all(-1)
    return equal if func.overloadpacket is aten.eq else ~equal


@register_complex(aten.index_put, aten._unsafe_index_put)
def _apply_put(func: Any, z: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    return ComplexFieldTensor(aten.index_put(lift_complex(z).pair, indices, lift_complex(values).pair, accumulate))


@register_complex(aten.index_add, aten.index_copy)
def _apply_index_add(func: Any, z: Any, dim: int, index: Tensor, source: Any, alpha: Any = 1) -> Any:
    source = source if alpha == 1 else aten.mul(source, alpha)
    return ComplexFieldTensor(func.overloadpacket(lift_complex(z).pair, dim % z.dim(), index, lift_complex(source).pair))


@register_complex(aten.constant_pad_nd)
def _apply_pad(func: Any, z: Any, sizes: Sequence[int], value: Any = 0) -> Any:
    if value:
        raise NotProvable("padding of complex numbers with another number than zero has no exact form yet")
    return _from_bits(None, func(_as_bits(z), sizes, 0), (z,))


@register_complex(aten._to_copy)
def _apply_cast(func: Any, z: ComplexFieldTensor, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    if dtype is torch.bool:
        return (z.pair != 0.0).any(-1)
    if dtype is not None and not dtype.is_complex:
        if not dtype.is_floating_point:
            raise NotProvable("a computed number is rounded to a whole one")
        return parts_of(z)[0].clone()
    return _apply_structure(aten.clone.default, z)


_FILLED = {aten.zeros_like: 0, aten.new_zeros: 0, aten.empty_like: 0, aten.new_empty: 0, aten.ones_like: 1, aten.new_ones: 1}


@register_complex(*_FILLED, aten.full_like, aten.new_full, aten.new_empty_strided)
def _apply_allocate(func: Any, z: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    operator, values = func.overloadpacket, list(args)
    shape = tuple(z.shape) if operator.__name__.endswith("_like") else tuple(values.pop(0))
    value = values[0] if operator in (aten.full_like, aten.new_full) else _FILLED.get(operator, 0)
    if dtype is not None and not dtype.is_complex:
        if not dtype.is_floating_point:
            return torch.full(shape, value, dtype=dtype)
        real: Any = zeros_of(shape)
        return real if not value else write(real, value)
    out = ComplexFieldTensor(zeros_of((*shape, 2)))
    return out if not value else write(out, value)


@register_complex(aten.copy_)
def _apply_copy(func: Any, target: Tensor, source: Any, *rest: Any) -> Any:
    if not target.is_complex():
        source = parts_of(source)[0]
    return write(target, source)


@register_complex(aten.fill_)
def _apply_fill(func: Any, target: Tensor, value: Any) -> Any:
    return write(target, value)


@register_complex(aten.zero_)
def _apply_zero(func: Any, target: Tensor) -> Any:
    return write(target, 0.0)


@register_complex(aten.is_same_size)
def _is_same_size(func: Any, x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape
