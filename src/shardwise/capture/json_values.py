"""JSON values of graphs and of what a model returns: plain data, named tuples, dataclasses; read back where their classes are loaded."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable, Word
from shardwise.ops.operator import Slot

_CLASSES = {cls.__name__: cls for cls in (Graph, Operator, Ref, Tensor, Variable, Word, Slot)}
_FIELDS = {cls: [f.name for f in dataclasses.fields(cls) if f.init] for cls in _CLASSES.values()}


class UnwritableValue(Exception):
    """A value of a class that JSON values do not name."""


@dataclasses.dataclass
class NamedObject:
    """A placeholder for an object in an output, by class name."""

    name: str


def to_json_value(x: Any) -> Any:
    if type(x) in (int, str, bool, type(None)) or (type(x) is float and math.isfinite(x)):
        return x
    if type(x) in _FIELDS:
        return ["=", type(x).__name__, *(to_json_value(getattr(x, name)) for name in _FIELDS[type(x)])]
    if type(x) in (tuple, list):
        return [type(x).__name__, *map(to_json_value, x)]
    if type(x) is dict:
        return ["dict", *([to_json_value(key), to_json_value(value)] for key, value in x.items())]
    if type(x) in (float, complex):
        return [type(x).__name__, repr(x)]
    if isinstance(x, torch.Tensor):
        return ["tensor", list(x.shape), str(x.dtype).removeprefix("torch.")]
    if isinstance(x, torch.Size):
        return ["tuple", *x]
    if type(x) is NamedObject:
        return ["object", x.name]
    return _container_to_json_value(x)


def _container_to_json_value(x: Any) -> Any:
    """Serialise a named tuple or dataclass, as outputs of libraries are."""
    path = [type(x).__module__, type(x).__qualname__]
    if isinstance(x, tuple) and hasattr(x, "_make"):
        return ["named", *path, *map(to_json_value, x)]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        items = x if isinstance(x, Mapping) else {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
        return ["data", *path, *([key, to_json_value(value)] for key, value in items.items())]
    raise UnwritableValue(type(x).__name__)


def _loaded_class(module: str, name: str) -> Any:
    """Return a class that is already loaded; nothing is imported."""
    cls: Any = sys.modules[module]
    for part in name.split("."):
        cls = getattr(cls, part)
    if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or hasattr(cls, "_make")):
        raise LookupError(name)
    return cls


def _build_dataclass(module: str, name: str, *items: Any) -> Any:
    return _loaded_class(module, name)(**{key: from_json_value(value) for key, value in items})


_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "=": lambda name, *rest: _CLASSES[name](*map(from_json_value, rest)),
    "tuple": lambda *rest: tuple(map(from_json_value, rest)),
    "list": lambda *rest: list(map(from_json_value, rest)),
    "dict": lambda *rest: {from_json_value(key): from_json_value(value) for key, value in rest},
    "float": float,
    "complex": complex,
    "tensor": lambda shape, dtype: torch.empty(shape, dtype=getattr(torch, dtype), device="meta"),
    "named": lambda module, name, *rest: _loaded_class(module, name)._make(map(from_json_value, rest)),
    "data": _build_dataclass,
    "object": lambda name: type(name, (), {})(),
}


def from_json_value(x: Any) -> Any:
    return _CONSTRUCTORS[x[0]](*x[1:]) if isinstance(x, list) else x
