"""Interval analysis of operators: bounds of values without computing them, enough to see that a truncated normal rejects nothing.

`torch.nn.init.trunc_normal_` reads the values to see whether any lies outside the interval. With the usual interval of 100 standard
deviations none can, and a model of any size is planned without drawing one number. Booleans are 0 and 1. NaN is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Bounds = tuple[float, float]

# A normal draw is at most sqrt(-2 ln 2^-53) = 8.6 standard deviations from the mean (Box-Muller on a 53-bit uniform); the rest is rounding.
_NORMAL_REACH = 10.0


def bounds_of(func: Any, args: Any, bounds: Callable[[Any], Bounds | None]) -> Bounds | None:
    """Return the bounds (low, high) of the result of `func(*args)`, or None. `bounds` returns those of a tensor argument."""
    name = str(func).removeprefix("aten.")
    if name == "normal_.default":
        mean = args[1] if len(args) > 1 else 0.0
        std = args[2] if len(args) > 2 else 1.0
        reach = _NORMAL_REACH * std + 0.01 * abs(mean)
        return mean - reach, mean + reach
    if name in ("lt.Scalar", "gt.Scalar"):
        source = bounds(args[0])
        if source is None:
            return None
        low, high = source if name == "lt.Scalar" else (-source[1], -source[0])
        limit = args[1] if name == "lt.Scalar" else -args[1]
        return (0, 0) if low >= limit else (1, 1) if high < limit else None
    if name in ("bitwise_or.Tensor", "logical_or.default"):
        both = bounds(args[0]), bounds(args[1])
        return (0, 0) if both == ((0, 0), (0, 0)) else None
    if name == "any.default":
        return (0, 0) if bounds(args[0]) == (0, 0) else None
    return None
