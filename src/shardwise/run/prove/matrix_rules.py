"""Rules of inverses, determinants and systems of square matrices: by elimination in the field, where nothing is lost by any order of rows.

An inverse is the adjugate over the determinant, of which the degrees are. In place of an LU factorisation, which backward alone reads, is
the matrix that it would be of; factorisations whose parts a model reads stay without a rule, since their pivots are chosen by size.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import finite_field as field
from shardwise.run.prove.degrees import CERTAINTY, CONSTANT, Degree
from shardwise.run.prove.field_tensor import FieldTensor, aten, degree_of, lift_constants, register_for
from shardwise.run.prove.finite_field import P
from shardwise.run.prove.rules import matrix_product


def eliminate(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses and determinants of residues [..., n, n]; an inverse is of no use where the determinant is 0."""
    n, batch = matrices.shape[-1], matrices.shape[:-2]
    left = matrices.reshape(-1, n, n)
    rows = torch.cat([left, torch.eye(n, dtype=torch.int64).expand(left.shape)], -1)
    determinants = torch.ones(len(rows), dtype=torch.int64)
    for i in range(n):
        at = (rows[:, i:, i] != 0).to(torch.int64).argmax(1) + i
        order = torch.arange(n).repeat(len(rows), 1).scatter_(1, at.unsqueeze(1), i)
        order[:, i] = at
        rows = rows.gather(1, order.unsqueeze(-1).expand(rows.shape))
        pivots = rows[:, i, i]
        determinants = field.multiply_residues(torch.where(at == i, determinants, -determinants % P), pivots)
        row = field.multiply_residues(rows[:, i], field.inverse_of(pivots).unsqueeze(-1))
        factors = rows[:, :, i : i + 1].clone()
        factors[:, i] = 0
        rows = field.add_residues(rows, field.multiply_residues(factors, row.unsqueeze(1)), sign=-1)
        rows[:, i] = row
    return rows[..., n:].reshape(*batch, n, n), determinants.reshape(batch)


def _power_of(degree: Degree, n: int) -> Degree:
    """Return the degree of a product of n numbers."""
    return reduce(add, [degree] * n, CONSTANT)


def _invert(a: FieldTensor) -> FieldTensor:
    inverse, determinants = eliminate(a.a)
    own, n = degree_of(a), a.shape[-1]
    divided = CERTAINTY.add_divisors(_power_of(own, n), determinants.numel(), int((determinants == 0).sum()))
    return FieldTensor(inverse, degree=[_power_of(own, n - 1) + divided])


def _determinant(a: FieldTensor) -> FieldTensor:
    return FieldTensor(eliminate(a.a)[1], degree=[_power_of(degree_of(a), a.shape[-1])])


def _pivots_of(a: FieldTensor) -> Tensor:
    return torch.arange(1, a.shape[-1] + 1, dtype=torch.int32).expand(a.shape[:-1])


def _factor_of_determinant(a: FieldTensor) -> tuple[Any, Tensor]:
    """Return what stands for the factors that torch saves of a determinant: of a contiguous matrix those of the transposed one."""
    return (a.mT if a.is_contiguous() else a).clone(), _pivots_of(a)


@register_for(aten.linalg_inv_ex)
def _invert_matrices(func: Any, a: FieldTensor, check_errors: bool = False) -> Any:
    return _invert(a), torch.zeros(a.shape[:-2], dtype=torch.int32)


@register_for(aten._linalg_det)
def _take_determinant(func: Any, a: FieldTensor) -> Any:
    return _determinant(a), *_factor_of_determinant(a)


@register_for(aten._linalg_slogdet)
def _take_logarithm_of_determinant(func: Any, a: FieldTensor) -> Any:
    determinant: Any = _determinant(a)
    return determinant.sign(), determinant.abs().log(), *_factor_of_determinant(a)


@register_for(aten._linalg_solve_ex)
def _solve_system(func: Any, a: Any, b: Any, left: bool = True, check_errors: bool = False) -> Any:
    a, b = lift_constants(a), lift_constants(b)
    is_vector = b.dim() == 1 or b.shape == a.shape[:-1]
    solved = _multiply(_invert(a), b.unsqueeze(-1) if is_vector else b, left)
    return solved.squeeze(-1) if is_vector else solved, a.clone(), _pivots_of(a), torch.zeros(a.shape[:-2], dtype=torch.int32)


@register_for(aten.linalg_lu_solve)
def _solve_factored_system(func: Any, factors: Any, pivots: Tensor, b: Any, left: bool = True, adjoint: bool = False) -> Any:
    a = lift_constants(factors)
    return _multiply(_invert(a.mT if adjoint else a), lift_constants(b), left)  # type: ignore[arg-type]


def _multiply(inverse: Any, b: Any, left: bool) -> Any:
    return matrix_product(inverse, b) if left else matrix_product(b, inverse)


@register_for(aten.linalg_cholesky_ex)
def _factor_by_columns(func: Any, a: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """Return the triangular factor, column by column; square roots are those of numbers, whose squares are exact."""
    columns: list[Any] = []
    for j in range(a.shape[-1]):
        rest: Any = a[..., j, j:] if upper else a[..., j:, j]
        for k, column in enumerate(columns):
            rest = rest - column[..., j - k :] * column[..., j - k : j - k + 1]
        root = rest[..., :1].sqrt()
        columns.append(torch.cat([root, rest[..., 1:] / root], -1))
    padded = [aten.constant_pad_nd(column, (k, 0)) for k, column in enumerate(columns)]
    factor: Any = torch.stack(padded, -2 if upper else -1)
    return factor, torch.zeros(a.shape[:-2], dtype=torch.int32)
