"""What a module keeps in Python: its attributes, hooks on forward, and which parameters, buffers and parts it has.

In: a module. Out: its state, what differs between two states, and a module that is put back to one. So a call that changes what the next
one computes is noticed. Not modelled: what happens inside of objects that a module holds, apart from lists, dicts, sets and deques of plain
values.
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
_HOOKS = {key for key in _MODULE_KEYS if "forward" in key and "hooks" in key}  # a model may hang some on its parts when it is first called


@dataclass(frozen=True, slots=True)
class _Contents:
    """A container and what was in it."""

    container: Any
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    """A module's own parameters, buffers or parts, by name."""

    container: dict[str, Any]
    items: tuple[tuple[str, Any], ...]


def state_of(model: nn.Module) -> State:
    """Every attribute of all modules, with the contents of containers; hooks on forward; which parameters, buffers and parts there are."""
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
    """Attributes that differ, as `layers.0.count`."""
    missing = object()
    names = sorted({*before, *after})
    return [".".join(n).removeprefix(".") for n in names if not _equal(before.get(n, missing), after.get(n, missing))]


def tensors_kept(state: State) -> dict[tuple[Any, ...], torch.Tensor]:
    """Tensors in attributes and in the containers there, by where they are."""

    def kept(place: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, _Contents):
            yield from kept(place, value.items)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                yield from kept((*place, number), item)

    return dict(entry for place, value in state.items() for entry in kept(place, value))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, _Table) and isinstance(b, _Table):  # what is written or replaced in it is looked at elsewhere
        return [key for key, _ in a.items] == [key for key, _ in b.items]
    if isinstance(a, _Contents) and isinstance(b, _Contents):
        return a.container is b.container and _equal(a.items, b.items)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    by_value = isinstance(a, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
    return a is b or (by_value and type(a) is type(b) and a == b)


def set_state(model: nn.Module, state: State) -> None:
    """Give all modules the attributes of `state`, and take away those that it lacks."""
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
