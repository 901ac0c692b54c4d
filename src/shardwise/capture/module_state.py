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

ModuleState = Mapping[tuple[str, str], Any]  # (path of a module, attribute) -> value
_MODULE_KEYS = set(vars(nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = {key for key in _MODULE_KEYS if "forward" in key and "hooks" in key}  # a model may register some in its first call


@dataclass(frozen=True, slots=True)
class _ContainerContents:
    """A container and its recorded items."""

    container: Any
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _RegisteredTable:
    """A module's own parameters, buffers or submodules, by name."""

    container: dict[str, Any]
    items: tuple[tuple[str, Any], ...]


def state_of(model: nn.Module) -> ModuleState:
    """Record all attributes of all modules, with contents of containers, forward hooks, and names of parameters, buffers, submodules."""
    return {
        (path, key): _RegisteredTable(value, tuple(value.items())) if key in _TABLES else _record_contents(value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _MODULE_KEYS or key in _HOOKS or key in _TABLES
    }


def _record_contents(value: Any) -> Any:
    if isinstance(value, list | set | deque):
        return _ContainerContents(value, tuple(map(_record_contents, value)))
    if isinstance(value, dict):
        return _ContainerContents(value, tuple((key, _record_contents(item)) for key, item in value.items()))
    return value


def changed_attributes(before: ModuleState, after: ModuleState) -> list[str]:
    """Return the attributes that differ, as `layers.0.count`."""
    missing = object()
    names = sorted({*before, *after})
    return [".".join(n).removeprefix(".") for n in names if not _is_equal(before.get(n, missing), after.get(n, missing))]


def tensors_in_state(state: ModuleState) -> dict[tuple[Any, ...], torch.Tensor]:
    """Return tensors in attributes and in their containers, by place."""

    def tensors_in(place: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, _ContainerContents):
            yield from tensors_in(place, value.items)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                yield from tensors_in((*place, number), item)

    return dict(entry for place, value in state.items() for entry in tensors_in(place, value))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, _RegisteredTable) and isinstance(b, _RegisteredTable):  # writes and replacements of its tensors are checked elsewhere
        return [key for key, _ in a.items] == [key for key, _ in b.items]
    if isinstance(a, _ContainerContents) and isinstance(b, _ContainerContents):
        return a.container is b.container and _is_equal(a.items, b.items)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    by_value = isinstance(a, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
    return a is b or (by_value and type(a) is type(b) and a == b)


def set_state(model: nn.Module, state: ModuleState) -> None:
    """Restore the attributes of all modules from `state`, and delete those that it lacks."""
    for value in state.values():
        if isinstance(value, _RegisteredTable):
            _restore_value(value)
    for path, module in model.named_modules():
        for key in [key for key in vars(module) if key not in _MODULE_KEYS and (path, key) not in state]:
            del vars(module)[key]
    for (path, key), value in state.items():
        vars(model.get_submodule(path))[key] = _restore_value(value)


def _restore_value(value: Any) -> Any:
    if isinstance(value, _RegisteredTable):
        value.container.clear()
        value.container.update(value.items)
        return value.container
    if not isinstance(value, _ContainerContents):
        return value
    container = value.container
    items = [(item[0], _restore_value(item[1])) if isinstance(container, dict) else _restore_value(item) for item in value.items]
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)
    return container
