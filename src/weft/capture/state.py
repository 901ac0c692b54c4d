"""Python state of a module: attributes, forward hooks, and its tables of parameters, buffers and submodules.

States are recorded, compared and restored, to detect a forward call that changes what the next one computes. Mutations inside of other
objects than lists, dicts, sets and deques of plain values are not detected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

State = Mapping[tuple[str, str], Any]  # (path of a module, attribute) -> value
_MODULE_KEYS = set(vars(nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = {key for key in _MODULE_KEYS if "forward" in key and "hooks" in key}  # a model may register some in its first call


@dataclass(frozen=True, slots=True)
class _Contents:
    """A container and its recorded items."""

    container: Any
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    """A module's own parameters, buffers or submodules, by name."""

    container: dict[str, Any]
    items: tuple[tuple[str, Any], ...]


def state_of(model: nn.Module) -> State:
    """Record all attributes of all modules, with contents of containers, forward hooks, and names of parameters, buffers, submodules."""
    return {
        (path, key): _Table(value, tuple(value.items())) if key in _TABLES else _contents(value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _MODULE_KEYS or key in _HOOKS or key in _TABLES
    }


def _contents(value: Any) -> Any:
    if isinstance(value, list | set | deque):
        return _Contents(value, tuple(map(_contents, value)))
    if isinstance(value, dict):
        return _Contents(value, tuple((key, _contents(item)) for key, item in value.items()))
    return value


def changes(before: State, after: State) -> list[str]:
    """Return the attributes that differ, as `layers.0.count`."""
    missing = object()
    names = sorted({*before, *after})
    return [".".join(n).removeprefix(".") for n in names if not _equal(before.get(n, missing), after.get(n, missing))]


def tensors_kept(state: State) -> dict[tuple[Any, ...], torch.Tensor]:
    """Return tensors in attributes and in their containers, by place."""

    def tensors_in(place: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, _Contents):
            yield from tensors_in(place, value.items)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                yield from tensors_in((*place, number), item)

    return dict(entry for place, value in state.items() for entry in tensors_in(place, value))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, _Table) and isinstance(b, _Table):  # writes and replacements of its tensors are checked elsewhere
        return [key for key, _ in a.items] == [key for key, _ in b.items]
    if isinstance(a, _Contents) and isinstance(b, _Contents):
        return a.container is b.container and _equal(a.items, b.items)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    by_value = isinstance(a, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
    return a is b or (by_value and type(a) is type(b) and a == b)


def set_state(model: nn.Module, state: State) -> None:
    """Restore the attributes of all modules from `state`, and delete those that it lacks."""
    for value in state.values():
        if isinstance(value, _Table):
            _restored(value)
    for path, module in model.named_modules():
        for key in [key for key in vars(module) if key not in _MODULE_KEYS and (path, key) not in state]:
            del vars(module)[key]
    for (path, key), value in state.items():
        vars(model.get_submodule(path))[key] = _restored(value)


def _restored(value: Any) -> Any:
    if isinstance(value, _Table):
        value.container.clear()
        value.container.update(value.items)
        return value.container
    if not isinstance(value, _Contents):
        return value
    container = value.container
    items = [(item[0], _restored(item[1])) if isinstance(container, dict) else _restored(item) for item in value.items]
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)
    return container
