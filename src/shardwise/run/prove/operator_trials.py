"""How an operator's results hang together with its arguments, found by calling it on real numbers (float64).

In: a call, of which only shapes, whole numbers and settings count. Out: by result, the dimensions along which the operator acts on each
slice by itself, and the argument in which it is linear. Nothing is read from `ops`: what the planner believes of an operator is not what a
proof of its plan may rest on. Not found: sums over slices, and dimensions of several that were merged into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.world import private

_CLOSE, _NUM_TRIALS = 1e-8, 2  # relative to the largest number of a result; of other random numbers each
_MAX_SLICES = 9  # of a dimension that are compared


@dataclass(frozen=True)
class TensorArgument:
    """A tensor among the arguments of a call: of random numbers, or of these whole ones. `values`: None where they are random."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: tuple[int, ...] | None


@dataclass(frozen=True)
class TriedCall:
    """A call of an operator: its tensors in order, and other arguments. `settings` holds the position of a tensor, or a value."""

    operator: Any
    settings: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    tensors: tuple[TensorArgument, ...]

    def run(self, tensors: Sequence[Tensor], replaced: Callable[[Any], Any] = lambda value: value) -> list[Any]:
        """Return the results on tensors, with other settings replaced."""

        def fill_setting(value: Any) -> Any:
            if isinstance(value, TensorPosition):
                return tensors[value.number]
            if isinstance(value, tuple) and any(isinstance(item, TensorPosition) for item in value):
                return [fill_setting(item) for item in value]
            return replaced(list(value) if isinstance(value, tuple) else value)

        result = self.operator(*map(fill_setting, self.settings), **{key: fill_setting(value) for key, value in self.keywords})
        return list(result) if isinstance(result, list | tuple) else [result]


@dataclass(frozen=True)
class TensorPosition:
    """Where a tensor stands among the settings of a call."""

    number: int


@dataclass(frozen=True, slots=True)
class SliceDim:
    """A dimension of a result along which each slice follows from slices of the arguments. `of_arguments`: the dimension of each tensor,
    None where it is whole."""

    of_result: int
    of_arguments: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ResultStructure:
    """Of one result: its shape and type, the dimensions of slices, and the number of the tensor in which it is linear, or None. `values`:
    whole numbers, where they follow from shapes, settings and whole numbers alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    dims: tuple[SliceDim, ...] = ()
    linear_in: int | None = None
    values: tuple[int, ...] | None = None


def describe_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[TriedCall, list[Tensor]]:
    """Return a call's description, and its tensors."""
    tensors = list[Tensor]()

    def describe_setting(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return TensorPosition(len(tensors) - 1)
        return tuple(map(describe_setting, value)) if isinstance(value, list | tuple) else value

    settings, keywords = tuple(map(describe_setting, args)), tuple((key, describe_setting(value)) for key, value in kwargs.items())
    return TriedCall(operator, settings, keywords, tuple(map(_describe_tensor, tensors))), tensors


def _describe_tensor(x: Tensor) -> TensorArgument:
    return TensorArgument(tuple(x.shape), x.dtype, None if _has_numbers(x) else tuple(x.flatten().tolist()))


def _has_numbers(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


@lru_cache(maxsize=1 << 10)
def find_structures(call: TriedCall) -> tuple[ResultStructure | None, ...]:
    """Return the structure of each result, None where that is None.

    Raises:
        ValueError: it does not run on random numbers, or computes whole ones.
    """
    reason = ValueError("it does not run on random numbers")
    for draw in _DRAWS:
        trials = [trial for seed in range(_NUM_TRIALS) if (trial := _try_draw(call, draw, seed)) is not None]
        if len(trials) == _NUM_TRIALS:
            try:
                return tuple(None if x is None else _structure_of(call, trials, index) for index, x in enumerate(trials[0][1]))
            except ValueError as error:
                reason = error
    raise reason


_Trial = tuple[list[Tensor], list[Any]]  # arguments and results


def _structure_of(call: TriedCall, trials: Sequence[_Trial], index: int) -> ResultStructure:
    result = trials[0][1][index]
    if not isinstance(result, Tensor):
        raise ValueError("it returns no tensor")
    if not _has_numbers(result):
        if private.result_names(call.operator)[index] == "info":  # of a factorisation: zero where there is one
            result = torch.zeros_like(result)
        elif not _is_constant(call, index, result):
            raise ValueError("it returns whole numbers")
        return ResultStructure(tuple(result.shape), result.dtype, values=tuple(result.flatten().tolist()))
    dims = list[SliceDim]()
    for dim, size in enumerate(() if _reads_indices(call) else result.shape):
        if size > 1 and (found := _find_slice_dim(call, trials, index, dim, dims)) is not None:
            dims.append(found)
    linear_in = next((number for number in _numbers(call) if _is_linear(call, trials, index, number)), None)
    return ResultStructure(tuple(result.shape), result.dtype, tuple(dims), linear_in)


def _is_constant(call: TriedCall, index: int, result: Tensor) -> bool:
    """Return whether a result of whole numbers is the same for all kinds of random numbers, small and large ones."""
    for seed, draw in enumerate((*_DRAWS, *_LARGE_DRAWS)):
        generator = torch.Generator().manual_seed(seed)
        results = _try_call(call, [_draw_argument(argument, draw, generator) for argument in call.tensors])
        if results is not None and not _are_close(result, results[index]):
            return False
    return True


def _reads_indices(call: TriedCall) -> bool:
    """Return whether an operator of torch's own has indices, which it may trust: on slices of them it would read what is not there."""
    has_indices = any(x.values is not None and x.shape and x.dtype is not torch.bool for x in call.tensors)
    return has_indices and call.operator.namespace in ("aten", "prims")


def _numbers(call: TriedCall) -> Iterator[int]:
    return (number for number, argument in enumerate(call.tensors) if argument.values is None)


def _try_draw(call: TriedCall, draw: Callable[[Tensor], Tensor], seed: int) -> _Trial | None:
    """Return random arguments and their results; None if there are none, or others the second time."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [_draw_argument(argument, draw, generator) for argument in call.tensors]
    results, again = _try_call(call, tensors), _try_call(call, tensors)
    if results is None or again is None or not all(_is_number(x) for x in results if isinstance(x, Tensor)):
        return None
    return (tensors, results) if all(x is None or _are_close(x, y) for x, y in zip(results, again, strict=True)) else None


def _is_number(x: Tensor) -> bool:
    return not x.numel() or not _has_numbers(x) or bool(torch.isfinite(x).any())


def _try_call(call: TriedCall, tensors: Sequence[Tensor], replaced: Callable[[Any], Any] = lambda value: value) -> list[Any] | None:
    try:
        return call.run(tensors, replaced)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def _draw_argument(argument: TensorArgument, draw: Callable[[Tensor], Tensor], generator: torch.Generator) -> Tensor:
    if argument.values is not None:
        return torch.tensor(argument.values, dtype=argument.dtype).reshape(argument.shape)
    if argument.dtype.is_complex:
        parts = [torch.randn(argument.shape, dtype=torch.float64, generator=generator) for _ in range(2)]
        return torch.complex(*map(draw, parts))
    return draw(torch.randn(argument.shape, dtype=torch.float64, generator=generator))


def _definite(x: Tensor) -> Tensor:
    """Return positive definite matrices, where the last two dimensions are equal."""
    if x.dim() < 2 or x.shape[-1] != x.shape[-2]:
        return x
    return x @ x.mT + x.shape[-1] * torch.eye(x.shape[-1], dtype=x.dtype)


_DRAWS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: x, torch.sigmoid, lambda x: 1 + x.exp(), _definite)
_LARGE_DRAWS: tuple[Callable[[Tensor], Tensor], ...] = (lambda x: 1e3 * x, lambda x: x.sign() * 1e9, torch.zeros_like)


def _are_close(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor):
        return bool(x == y)
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not _has_numbers(x):
        return torch.equal(x, y)
    finite = x[torch.isfinite(x)]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    return torch.allclose(x, y, rtol=_CLOSE, atol=_CLOSE * largest, equal_nan=True)


def _find_slice_dim(call: TriedCall, trials: Sequence[_Trial], index: int, dim: int, found: Sequence[SliceDim]) -> SliceDim | None:
    """Return the dimension of each argument that a dimension of a result goes with; None if slices are not by themselves."""
    size, matched = trials[0][1][index].shape[dim], list[int | None]()
    for number, argument in enumerate(call.tensors):
        taken = {other.of_arguments[number] for other in found}
        candidates = [d for d, n in enumerate(argument.shape) if n == size and d not in taken]
        candidates.sort(key=lambda d: (d != dim, d))
        matched.append(next((d for d in candidates if _depends_on_its_slice_alone(call, trials, index, dim, number, d)), None))
    proposed = SliceDim(dim, tuple(matched))
    return proposed if any(d is not None for d in matched) and _acts_on_slices(call, trials, index, proposed) else None


def _depends_on_its_slice_alone(call: TriedCall, trials: Sequence[_Trial], index: int, dim: int, number: int, own: int) -> bool:
    """Return whether a slice of the result stays if all slices of a tensor become that one."""
    for tensors, results in trials:
        for place in (0, results[index].shape[dim] - 1):
            repeated = tensors[number].narrow(own, place, 1).expand(tensors[number].shape).contiguous()
            changed = _try_call(call, [*tensors[:number], repeated, *tensors[number + 1 :]])
            if changed is None or not _are_close(results[index].select(dim, place), _select(changed[index], dim, place)):
                return False
    return True


def _select(x: Tensor, dim: int, place: int) -> Tensor:
    return x.select(dim, place) if x.dim() > dim and x.shape[dim] > place else x.new_empty(0)


def _acts_on_slices(call: TriedCall, trials: Sequence[_Trial], index: int, proposed: SliceDim) -> bool:
    """Return whether the operator on slices of its arguments has that slice of its result: on single ones, and on several."""
    for tensors, results in trials:
        result, dim = results[index], proposed.of_result
        size = result.shape[dim]
        places = range(size) if size <= _MAX_SLICES else sorted({round(i * (size - 1) / (_MAX_SLICES - 1)) for i in range(_MAX_SLICES)})
        for start, length in (*((place, 1) for place in places), (0, max(1, size // 2)), (size // 2, size - size // 2)):
            part = [
                x if d is None else x.narrow(d, start, length).contiguous() for x, d in zip(tensors, proposed.of_arguments, strict=True)
            ]
            expected = result.narrow(dim, start, length)
            own = _try_call(call, part, _resize_lists(result.shape, dim, length)) or _try_call(call, part)
            if own is None or not _are_close(expected, own[index]):
                return False
    return True


def _resize_lists(shape: Sequence[int], dim: int, length: int) -> Callable[[Any], Any]:
    """Return what gives a list that has the sizes of a result those of its slice."""

    def resize_list(value: Any) -> Any:
        fits = isinstance(value, list) and value == list(shape)
        return [*value[:dim], length, *value[dim + 1 :]] if fits else value

    return resize_list


def _is_linear(call: TriedCall, trials: Sequence[_Trial], index: int, number: int) -> bool:
    """Return whether a result is linear in a tensor, the others being what they are."""
    (x, first), (others, _) = trials[0], trials[1]
    y = others[number]
    results = [_try_call(call, [*x[:number], value, *x[number + 1 :]]) for value in (y, 2 * x[number] + 3 * y, torch.zeros_like(y))]
    if any(result is None for result in results):
        return False
    second, both, none = (result[index] for result in results if result is not None)
    return bool((none == 0).all()) and _are_close(both, 2 * first[index] + 3 * second)


def refuse_call(operator: Any) -> str:
    """Return why no function of its arguments stands for an operator; empty if one may."""
    if not private.is_operator(operator):
        return "it is no operator of torch"
    if private.writes_or_aliases(operator):
        return "it writes its arguments, or returns views of them"
    return "it draws random numbers" if torch.Tag.nondeterministic_seeded in operator.tags else ""
