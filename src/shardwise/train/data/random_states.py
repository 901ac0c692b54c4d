"""States of random generators as JSON values: torch's, Python's and NumPy's global ones, and those that data sets and samplers own."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LEAVES = (str, bytes, int, float, torch.Tensor, np.ndarray, type(None), type, ModuleType)
_MAX_DEPTH, _MAX_ITEMS = 5, 32


def find_generators(roots: Iterable[Any]) -> list[Any]:
    """Return the generators that objects own: in their attributes, lists and dicts, some levels deep, in a fixed order."""
    found: list[Any] = []
    visited: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if id(value) in visited or isinstance(value, _LEAVES):
            return
        visited.add(id(value))
        if isinstance(value, _KINDS):
            found.append(value)
        elif depth < _MAX_DEPTH:
            items = value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else ()
            attributes = list(getattr(value, "__dict__", {}).values())
            for item in [*list(items)[:_MAX_ITEMS], *attributes]:
                visit(item, depth + 1)

    for root in roots:
        visit(root, 0)
    return found


def read_states(owned: Sequence[Any]) -> list[Any]:
    """Return the states of the global generators, then of the `owned` ones, as JSON values."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = numpy_state
    version, numbers, gauss = random.getstate()
    first = [torch.random.get_rng_state().numpy().tobytes().hex(), [version, list(numbers), gauss], [kind, keys.tolist(), *rest]]
    return [*first, *map(_read_state, owned)]


def write_states(states: Sequence[Any], owned: Sequence[Any]) -> None:
    """Set the global generators, and the `owned` ones, to the states that `read_states` returned."""
    torch.random.set_rng_state(_torch_state(states[0]))
    version, numbers, gauss = states[1]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(states[2]))
    for generator, state in zip(owned, states[3:], strict=False):
        _write_state(generator, state)


def _torch_state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _read_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().cpu().numpy().tobytes().hex()
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return [version, list(numbers), gauss]
    if isinstance(generator, np.random.Generator):
        return _as_json(generator.bit_generator.state)
    kind, keys, *rest = generator.get_state(legacy=True)
    return [kind, keys.tolist(), *rest]


def _write_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(_torch_state(state))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = state
        generator.setstate((version, tuple(numbers), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(tuple(state))


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
