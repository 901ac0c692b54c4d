"""Operators without an exact form: random functions of their arguments.

A result is a random function of the arguments' numbers, slice by slice where the operator acts on slices by itself, and linear where the
operator is (`operator_trials`). The operator itself is one of these functions, so two programs that are equal for all of them are equal;
one that calls it on other arguments, on another slice or on a part of what it mixes is found. A program that uses more of the operator
than that (a sum over slices, another order of its results) differs from an equal one; the proof then names the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import finite_field as field
from shardwise.run.prove.degrees import CERTAINTY, LINEAR, Degree
from shardwise.run.prove.field_tensor import (
    ComplexFieldTensor,
    FieldTensor,
    degree_of,
    hidden_or_none,
    lift_pairs,
    register_fallback,
)
from shardwise.run.prove.finite_field import P
from shardwise.run.prove.operator_trials import ResultStructure, TriedCall, describe_call, find_structures, refuse_call
from shardwise.world import private

_RANK = 4  # of a linear function: programs that call an operator fewer times on the same arguments have no more identities than with any


@register_fallback
def apply_unknown_operator(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Return random functions of the arguments; NotImplemented for operators that write, draw, or return whole numbers."""
    if refuse_call(func):
        return NotImplemented
    call, tensors = describe_call(func, args, kwargs)
    try:
        structures = find_structures(call)
    except (ValueError, TypeError):
        return NotImplemented
    CERTAINTY.unknown_operators.add(str(func.overloadpacket))
    numbers = [_Numbers.of_tensor(x) for x in tensors]
    results = [None if found is None else _result_of(call, numbers, index, found) for index, found in enumerate(structures)]
    return results[0] if private.returns_one_tensor(func) else results


@dataclass(frozen=True)
class _Numbers:
    """The numbers of an argument, complex ones as pairs in a last dimension, and where they are minus infinity."""

    numbers: Tensor
    hidden: Tensor | None
    degree: Degree

    @staticmethod
    def of_tensor(x: Tensor) -> _Numbers:
        if not (x.is_floating_point() or x.is_complex()):
            return _Numbers(x.to(torch.int64) % P, None, Degree())
        pairs = lift_pairs(x)
        hidden = hidden_or_none(pairs)
        return _Numbers(pairs.a, hidden if bool(hidden.any()) else None, degree_of(pairs))


def _split_slices(x: Tensor, dims: Sequence[int | None]) -> Tensor:
    """Return numbers as [size of each dimension of slices, numbers of a slice], 1 where a tensor has not the dimension."""
    first = [d for d in dims if d is not None]
    rest = [d for d in range(x.dim()) if d not in first]
    return x.permute([*first, *rest]).reshape(*(1 if d is None else x.shape[d] for d in dims), -1)


def _text_of(call: TriedCall, index: int, found: ResultStructure) -> str:
    """Return what a result depends on beside numbers: settings, and the shapes of slices. Dimensions of one entry are left out, so that one
    sample alone is what it is among others."""
    sliced = {dim.of_result for dim in found.dims}
    whole = [1 if dim in sliced else size for dim, size in enumerate(found.shape)]

    def describe_setting(value: Any) -> str:
        return repr(whole if value == found.shape else value)

    shapes = [
        [size for d, size in enumerate(argument.shape) if size > 1 and d not in {dim.of_arguments[number] for dim in found.dims}]
        for number, argument in enumerate(call.tensors)
    ]
    settings = [*map(describe_setting, call.settings), *(f"{key}={describe_setting(value)}" for key, value in sorted(call.keywords))]
    return f"{call.operator.overloadpacket} {index} {settings} {shapes}"


def _hash_slices(text: str, x: Tensor) -> Tensor:
    """Return a random linear function of the numbers of each slice: other numbers have the same value with a chance of 1 / P."""
    products = field.multiply_residues(x, field.random_function(text, torch.arange(x.shape[-1])))
    return field.apply_linear(lambda part: part.sum(-1), products)


def _result_of(call: TriedCall, arguments: Sequence[_Numbers], index: int, found: ResultStructure) -> Tensor:
    if found.values is not None:
        return torch.tensor(found.values, dtype=found.dtype).reshape(found.shape)
    text = _text_of(call, index, found)
    dims = [[dim.of_arguments[number] for dim in found.dims] for number in range(len(arguments))]
    shape = (*found.shape, 2) if found.dtype.is_complex else found.shape
    sliced = [dim.of_result for dim in found.dims]
    rest = [d for d in range(len(shape)) if d not in sliced]
    linear_in = None if found.linear_in is None or arguments[found.linear_in].hidden is not None else found.linear_in
    total = torch.zeros(tuple(shape[d] for d in sliced), dtype=torch.int64)
    for number, argument in enumerate(arguments):
        if number != linear_in:
            total = (total + _hash_slices(f"{text} {number}", _split_slices(argument.numbers, dims[number]))) % P
            if argument.hidden is not None:
                hidden = _split_slices(argument.hidden.to(torch.int64), dims[number])
                total = (total + _hash_slices(f"{text} hidden {number}", hidden)) % P
    CERTAINTY.num_functions += 1
    num_places = prod(shape[d] for d in rest)
    if linear_in is None:
        numbers, degree = field.random_function(text, _places_of(f"{text} place", total, num_places)), LINEAR
    else:
        own = arguments[linear_in]
        numbers = _apply_slopes(text, total, num_places, _split_slices(own.numbers, dims[linear_in]))
        degree = own.degree + LINEAR
    order = [*sliced, *rest]
    numbers = numbers.reshape([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))]).contiguous()
    out = FieldTensor(numbers, degree=[degree])
    return ComplexFieldTensor(out) if found.dtype.is_complex else out


def _places_of(text: str, total: Tensor, count: int) -> Tensor:
    """Return a number for each slice and each of `count` places in it."""
    return (total.unsqueeze(-1) + field.random_function(text, torch.arange(count))) % P


def _apply_slopes(text: str, total: Tensor, num_places: int, slices: Tensor) -> Tensor:
    """Return a random linear function of slices, which `total` chooses: of rank four, so that large slices take no large matrices."""
    numbers = torch.zeros((*total.shape, num_places), dtype=torch.int64)
    for rank in range(_RANK):
        slopes = field.random_function(f"{text} slope {rank}", _places_of(f"{text} column", total, slices.shape[-1]))
        products = field.multiply_residues(slopes, slices.expand(slopes.shape))
        sums = field.apply_linear(lambda part: part.sum(-1, keepdim=True), products)
        weights = field.random_function(f"{text} weight {rank}", _places_of(f"{text} place", total, num_places))
        numbers = (numbers + field.multiply_residues(weights, sums.expand(weights.shape))) % P
    return numbers
