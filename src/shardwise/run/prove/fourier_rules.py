"""Fourier transforms on tensors of a finite field: along each dimension a product with the matrix that torch has of unit vectors.

Cosines and sines that are no short fractions are unknowns of their own, so that what follows from their values alone (a transform and its
inverse are one) is not known. Frequencies that a real transform leaves out are left out here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove.complex_rules import join_parts, parts_of, register_complex
from shardwise.run.prove.field_tensor import aten, lift_constants, register_for

_BY_ROOT, _BY_SIZE = 1, 2  # torch's codes of a normalisation; 0: none
_DECIMALS = 14  # of cosines and sines, of which a half is one


def _matrix_of(values: Tensor) -> Any:
    return lift_constants(values.round(decimals=_DECIMALS))


def _multiply_along(x: Any, dim: int, matrix: Any) -> Any:
    return (x.transpose(dim, -1) @ matrix).transpose(dim, -1)


def _scale_of(size: int, normalization: int) -> float:
    if normalization == _BY_ROOT:
        return float(size**-0.5)
    return 1 / size if normalization == _BY_SIZE else 1.0


@register_complex(aten._fft_c2c)
def _transform(func: Any, z: Any, dims: Sequence[int], normalization: int, forward: bool) -> Any:
    for dim in dims:
        size = z.shape[dim]
        units = torch.ops.aten._fft_c2c(torch.eye(size, dtype=torch.complex128), [1], 0, forward)
        cosines, sines = _matrix_of(units.real), _matrix_of(units.imag)
        real, imaginary = (part * _scale_of(size, normalization) for part in parts_of(z))
        z = join_parts(
            _multiply_along(real, dim, cosines) - _multiply_along(imaginary, dim, sines),
            _multiply_along(real, dim, sines) + _multiply_along(imaginary, dim, cosines),
        )
    return z


@register_for(aten._fft_r2c)
def _transform_real(func: Any, x: Any, dims: Sequence[int], normalization: int, onesided: bool) -> Any:
    *others, last = dims
    units = torch.ops.aten._fft_r2c(torch.eye(x.shape[last], dtype=torch.float64), [1], 0, onesided)
    x = lift_constants(x) * _scale_of(x.shape[last], normalization)
    z = join_parts(*(_multiply_along(x, last, _matrix_of(part)) for part in (units.real, units.imag)))
    return _transform(func, z, others, normalization, True)


@register_complex(aten._fft_c2r)
def _transform_to_real(func: Any, z: Any, dims: Sequence[int], normalization: int, size: int) -> Any:
    *others, last = dims
    z = _transform(func, z, others, normalization, False)
    units = torch.eye(z.shape[last], dtype=torch.complex128)
    matrices = [_matrix_of(torch.ops.aten._fft_c2r(unit, [1], 0, size)) for unit in (units, units * 1j)]
    total: Any = sum(_multiply_along(part, last, matrix) for part, matrix in zip(parts_of(z), matrices, strict=True))
    return total * _scale_of(size, normalization)
