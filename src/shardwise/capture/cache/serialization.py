"""Serialise a capture as a safetensors file: its constants, with the graph as JSON in the metadata. No pickle.

Captures with user-defined autograd.Functions or fake constants are not serialised. Of an object in an output only its class name is stored.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from shardwise.capture.capture import CapturedGraph
from shardwise.capture.fakes import Fake
from shardwise.capture.nesting import is_literal_value, named_leaves, replace_leaves
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable, Word
from shardwise.ops.operator import Slot

_KEY = "shardwise"
_CLASSES = {cls.__name__: cls for cls in (Graph, Operator, Ref, Tensor, Variable, Word, Slot)}
_FIELDS = {cls: [f.name for f in dataclasses.fields(cls) if f.init] for cls in _CLASSES.values()}


class _Unwritable(Exception):
    pass


@dataclasses.dataclass
class _NamedObject:
    """A placeholder for an object in an output, by class name."""

    name: str


def dump(captured: CapturedGraph) -> bytes | None:
    """Serialise a capture; None if it cannot be."""
    constants = {name: x.detach().contiguous() for name, x in captured.constants.items() if not isinstance(x, Fake)}
    if len(constants) < len(captured.constants) or any(x.is_meta or x.layout is not torch.strided for x in constants.values()):
        return None
    if any(x.dtype is torch.complex128 for x in constants.values()):  # unsupported by safetensors
        return None
    shared = len({x.untyped_storage().data_ptr() for x in constants.values()}) < len(constants)
    storable = {
        path: leaf if isinstance(leaf, torch.Tensor) or is_literal_value(leaf) else _NamedObject(type(leaf).__name__)
        for path, leaf in named_leaves(captured.structure)
    }
    try:
        text = json.dumps([to_json_value(captured.graph), to_json_value(replace_leaves(captured.structure, storable))])
    except _Unwritable:
        return None
    return save_tensors({name: x.clone() if shared else x for name, x in constants.items()}, metadata={_KEY: text})


def load(data: bytes) -> CapturedGraph | None:
    """Deserialise the bytes of `dump`; None if they need classes that are not loaded."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        graph, structure = (from_json_value(part) for part in json.loads(header["__metadata__"][_KEY]))
        return CapturedGraph(graph, load_tensors(data), structure)
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return None


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
    if type(x) is _NamedObject:
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
    raise _Unwritable(type(x).__name__)


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
