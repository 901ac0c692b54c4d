"""Reduce a zoo model to the smallest configuration that has the same parameters but for size: what a proof of any scale runs.

In: the name of a model, and the sizes of axes before and after. Out: the name of a smaller one. Equal layers fold to a few: an argument
that only repeats parameters of the same shapes counts layers. Every other whole number is the smallest for which each dimension that an
axis divides has two entries a shard (and is unevenly divided where it was), the order of the numbers is kept, and the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.plan.ir.patterns import pattern_of
from shardwise.zoo import names

Shapes = Mapping[str, tuple[int, ...]]
MODULE_LIMITS = (150, 1000, 0)  # 0: any number
_INITIALISATIONS = {
    "normal_", "uniform_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_", "fill_", "zero_",
    "zeros_", "ones_", "constant_", "mul_", "div_", "erfinv_", "clamp_", "orthogonal_",
}  # fmt: skip
MAX_SIZE = 1024  # of a reduced number
MIN_RATIO = 2  # of numbers of which one was a multiple of the other


def reduce_name(text: str, sequence: int | None, divisors: Sequence[tuple[int, int]], num_stages: int, enlarge: int = 1) -> str:
    """Return the name of the reduced model.

    Args:
        divisors: (size before, size after) of axes that divide dimensions. num_stages: of the reduced pipeline, at least one layer each.
        enlarge: factor of numbers that no parameter's shape depends on (the length of a sequence, the size of an image).

    Raises:
        ModelError: no such model.
    """
    family, config = names.find(text, sequence)
    reduction = _ConfigReduction(family, config, tuple(divisors), max(2, num_stages), enlarge)
    reduced = reduction.reduce_numbers()
    family_name = next(name for name, known in names.FAMILIES.items() if known is family)
    return f"{family_name}:{','.join(f'{field.name}={_as_word(getattr(reduced, field.name))}' for field in fields(reduced))}"


def count_parameters(text: str, sequence: int | None) -> int:
    """Return how many parameters a zoo model has; a shared one counts once.

    Raises:
        ModelError: no such model.
    """
    family, config = names.find(text, sequence)
    shapes = _shapes_of(family.make_model, config)
    return sum(prod(shape) for shape in (shapes or {}).values())


def _as_word(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)


class _ConfigReduction:
    """The search for the smallest configuration."""

    def __init__(self, family: names.Family, config: Any, divisors: tuple[tuple[int, int], ...], min_layers: int, enlarge: int) -> None:
        self._family, self._config, self._divisors, self._min_layers = family, config, divisors, min_layers
        self._enlarge = enlarge

    def reduce_numbers(self) -> Any:
        """Fold layers, then reduce every other whole number, the smallest first."""
        config, counts = self._config, list[str]()
        for limit in MODULE_LIMITS:  # what counts layers is found where few modules are built
            for key in self._list_whole_numbers():
                if key not in counts and (folded := self._fold_layers(config, key, limit)) is not None:
                    config, counts = folded, [*counts, key]
        sizes = sorted((key for key in self._list_whole_numbers() if key not in counts), key=lambda key: int(getattr(self._config, key)))
        shapes, done = self._shapes_of(config), dict[str, int]()
        assert shapes is not None
        for key in sizes:
            config = self._reduce_size(config, key, done, shapes)
            done[key] = getattr(config, key)
        unfolded = self._shapes_of(replace(config, **{key: getattr(self._config, key) for key in counts}))
        folded_shapes = self._shapes_of(config)
        if unfolded is None or folded_shapes is None or _kinds_of(unfolded) != _kinds_of(folded_shapes):
            raise ModelError(f"layers differ from one another, so {', '.join(counts)} cannot be reduced; prove the model as it is")
        return config

    def _list_whole_numbers(self) -> list[str]:
        values = ((field.name, getattr(self._config, field.name)) for field in fields(self._config))
        return [name for name, value in values if isinstance(value, int) and not isinstance(value, bool) and value > 2]

    def _fold_layers(self, config: Any, key: str, limit: int) -> Any | None:
        """Return the configuration with fewer layers, if that is what the number counts; None if it counts something else."""
        before: Shapes | None = None
        for count in range(self._min_layers, min(getattr(config, key), self._min_layers + 4)):
            fewer = self._replace_number(config, key, count)
            shapes = None if fewer is None else self._shapes_of(fewer, limit)
            if before is not None and shapes is not None:
                if len(shapes) <= len(before):
                    return None
                if _kinds_of(shapes) == _kinds_of(before):
                    return self._replace_number(config, key, count - 1)
            before = shapes
        return None

    def _reduce_size(self, config: Any, key: str, done: Mapping[str, int], original: Shapes) -> Any:
        value = getattr(self._config, key)
        for candidate in self._list_candidates(value):
            if all(_keeps_order(getattr(self._config, other), value, small, candidate) for other, small in done.items()):
                smaller = self._replace_number(config, key, candidate)
                shapes = None if smaller is None else self._shapes_of(smaller)
                if shapes is not None and self._keeps_shapes(original, shapes):
                    larger = (
                        self._replace_number(config, key, min(candidate * self._enlarge, value))
                        if shapes == self._shapes_of(config)
                        else None
                    )
                    return larger or smaller
        return config

    def _list_candidates(self, value: int) -> list[int]:
        """Return smaller numbers, rising, that axes divide as they divide `value`.

        No number divides by a small axis and not by a large one where both become two ranks: then it divides by both."""
        sizes = range(1, min(value, MAX_SIZE))
        return [n for n in sizes if self._keeps_division(value, n)] or [n for n in sizes if self._keeps_division(value, n, False)]

    def _keeps_division(self, value: int, smaller: int, keeps_remainders: bool = True) -> bool:
        """Return whether axes divide both numbers alike; without `keeps_remainders` the smaller one may divide by more axes."""
        for before, after in self._divisors if value != smaller else ():
            old, new = (value % before == 0, value >= 2 * before), (smaller % after == 0, smaller >= 2 * after)
            if any(had and not has for had, has in zip(old, new, strict=True)) or (keeps_remainders and old != new):
                return False
        return smaller >= min(value, 2)

    def _keeps_shapes(self, before: Shapes, after: Shapes) -> bool:
        """Return whether the same parameters have dimensions that axes divide alike."""
        return before.keys() == after.keys() and all(
            len(shape) == len(after[name]) and all(self._keeps_division(n, m) for n, m in zip(shape, after[name], strict=True))
            for name, shape in before.items()
        )

    def _replace_number(self, config: Any, key: str, value: int) -> Any | None:
        try:
            return replace(config, **{key: value})
        except (ModelError, ValueError, AssertionError):
            return None

    def _shapes_of(self, config: Any, limit: int = 0) -> Shapes | None:
        return _shapes_of(self._family.make_model, config, limit)


@lru_cache(maxsize=256)
def _shapes_of(make_model: Callable[[Any], nn.Module], config: Any, limit: int = 0) -> Shapes | None:
    """Return the shapes of the parameters; None if the model cannot be built, or has more than `limit` modules."""
    count = 0

    def count_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal count
        count += 1
        if limit and count > limit:
            raise ModelError(f"more than {limit} modules")

    hook = register_module_module_registration_hook(count_module)
    try:
        with torch.device("meta"), _SkippedInitialisation():
            model = make_model(config)
    except (ModelError, RuntimeError, ValueError, AssertionError, ZeroDivisionError):
        return None
    finally:
        hook.remove()
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


class _SkippedInitialisation(TorchFunctionMode):
    """Leaves weights as they are allocated: on the meta device, initial values cost most of the time of a model's build."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _INITIALISATIONS:
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _kinds_of(shapes: Shapes) -> set[tuple[str, tuple[int, ...]]]:
    return {(pattern_of(name), shape) for name, shape in shapes.items()}


def _keeps_order(other: int, value: int, small_other: int, small: int) -> bool:
    """Return whether two numbers compare as before, and one is a multiple of the other where it was."""
    if other == value:
        return small == small_other
    if small <= small_other:
        return False
    return value % other != 0 or (small % small_other == 0 and small >= MIN_RATIO * small_other)
