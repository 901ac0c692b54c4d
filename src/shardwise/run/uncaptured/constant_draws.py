"""Constant random draws, equal for every sample, so that calls on different samples can be compared.

A dispatch mode in which operators that draw random numbers return one number from the middle of their distribution and leave torch's
generator as it was. Not covered: draws of integers, which stay random.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.world import private

_NUM_DEVIATIONS = 0.5  # standard deviations; not 0, which would hide factors of the noise


class ConstantDraws(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Dropout keeps everything, uniform numbers are the midpoint, normal ones half a standard deviation above the mean."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.partition(".")[0].removesuffix("_").removesuffix("_like").removesuffix("_functional")
        if name not in _DRAWS or not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        generator_state = torch.random.get_rng_state()
        result = func(*args, **kwargs)
        torch.random.set_rng_state(generator_state)
        arguments = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        with torch.no_grad():
            if name == "native_dropout":
                return arguments["input"] / (1 - arguments["p"]), torch.ones_like(result[1])
            number = _DRAWS[name](arguments)
            return result.copy_(number) if isinstance(number, Tensor) else result.fill_(number)


def _normal_value(arguments: dict[str, Any]) -> Any:
    return arguments.get("mean", 0.0) + _NUM_DEVIATIONS * arguments.get("std", 1.0)


_DRAWS: dict[str, Any] = {
    "rand": lambda arguments: 0.5,
    "uniform": lambda arguments: (arguments.get("from", 0.0) + arguments.get("to", 1.0)) / 2,
    "randn": lambda arguments: _NUM_DEVIATIONS,
    "normal": _normal_value,
    "bernoulli": lambda arguments: 1.0,
    "native_dropout": None,
    "exponential": lambda arguments: 1.0 / arguments.get("lambd", 1.0),
}
