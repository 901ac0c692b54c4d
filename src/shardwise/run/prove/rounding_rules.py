"""Rules of operators that round numbers of a finite field to whole ones, and of casts to whole numbers.

A small whole number stays itself; any other is rounded to a random small one, as likely 0 or 1 as 60: equal numbers give equal ones,
whatever reads them as indices. As of comparisons, another number may give the same; what is left of it, x - floor(x), does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.run.prove import finite_field as field
from shardwise.run.prove.degrees import CONSTANT
from shardwise.run.prove.field_tensor import FieldTensor, NotProvable, aten, lift_constants, register_for
from shardwise.run.prove.finite_field import P

_SMALL = 1 << 31
_MAX_BITS = 6  # of a number that others are rounded to


def whole_numbers_of(x: FieldTensor) -> tuple[Tensor, Tensor]:
    """Return the largest whole numbers below, of constants the true ones, and where `x` is such a number itself."""
    if x.hidden is not None:
        raise NotProvable("minus infinity is rounded to a whole number")
    signed, (constants, _) = torch.where(x.a > P // 2, x.a - P, x.a), field.reals_of(x.a)
    word = field.random_function("floor", x.a)
    below = (word >> 3) % (1 << word % (_MAX_BITS + 1)) - (word >> 50) % 4 // 3
    is_whole = signed.abs() < _SMALL
    below = torch.where(constants.isnan(), below, constants.floor().nan_to_num().to(torch.int64))
    return torch.where(is_whole, signed, below), is_whole


def _round(name: str, x: FieldTensor) -> Tensor:
    below, is_whole = whole_numbers_of(x)
    step = {
        "floor": torch.zeros_like(below),
        "ceil": torch.ones_like(below),
        "trunc": (below < 0).to(torch.int64),
        "round": field.random_function("round", x.a) % 2,
    }[name]
    return torch.where(is_whole, below, below + step)


@register_for(aten.floor, aten.ceil, aten.trunc, aten.round)
def _apply_rounding(func: Any, x: FieldTensor, decimals: int = 0) -> Any:
    scale = 10.0**decimals
    scaled: Any = x * scale if decimals else x
    whole = FieldTensor(_round(func.overloadpacket.__name__, scaled) % P, degree=[CONSTANT])
    return whole / scale if decimals else whole


def cast_to_whole_numbers(x: FieldTensor, dtype: torch.dtype) -> Tensor:
    """Return whole numbers, of those between two the one nearer to zero."""
    return _round("trunc", x).to(dtype)


@register_for(aten.frac)
def _take_fraction(func: Any, x: FieldTensor) -> Any:
    return x - x.trunc()


@register_for(aten.floor_divide)
def _divide_whole(func: Any, x: Any, y: Any) -> Any:
    return (lift_constants(x) / lift_constants(y)).floor()


@register_for(aten.remainder, aten.fmod)
def _take_remainder(func: Any, x: Any, y: Any) -> Any:
    x, y = lift_constants(x), lift_constants(y)
    quotient: Any = x / y
    return x - y * (quotient.floor() if func.overloadpacket is aten.remainder else quotient.trunc())
