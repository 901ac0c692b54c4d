"""Notice attributes of a divided module that a loop changes, among those that its graphs read: dropout's `p`, a temperature, a flag.

A change asks for another capture, as other modes do. Values are compared at every call: attributes by identity first, then the items of
their lists, dicts and plain objects (a configuration). Tensors count by identity and by in-place writes. So do globals and variables of
closures that the code of `forward` reads. Not noticed: objects without `__dict__` that are changed in place, and those that a global
names; data of more than 1,000 items.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Hashable
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.attribute_reads import AttributeRead, class_name_of
from shardwise.capture.global_reads import find_value_reads
from shardwise.world import private

AttributeChanges = tuple[tuple[str, Hashable], ...]  # (path of the attribute, its value) of each that is not as at the first capture
_MISSING = object()
_MAX_DEPTH, _MAX_ITEMS, _MANY_VALUES = 4, 1000, 4
_LITERALS = (int, str, bool, complex, bytes, type(None), torch.dtype, torch.device, range)


class _SameObject:
    """A key that equals that of the same object alone, and keeps it alive."""

    def __init__(self, x: object) -> None:
        self._object = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and other._object is self._object

    def __hash__(self) -> int:
        return id(self._object)


class AttributeWatch:
    """The attributes of a module's parts that its captures read. `reads`: grows with every capture."""

    def __init__(self, model: nn.Module, reads: set[AttributeRead]) -> None:
        self._model, self._reads, self._num_reads = model, reads, -1
        self._entries: dict[str, tuple[object, str]] = {}
        for words, holder, name in find_value_reads(model):
            self._entries[words if words not in self._entries else f"{words} ({len(self._entries)})"] = holder, name
        self._pairs: list[tuple[object, str]] = []
        self._baseline: dict[str, Hashable] = {}
        self._last: list[Any] = []
        self._containers: list[tuple[Any, list[Any]]] = []
        self._tensors: list[tuple[Tensor, int]] = []
        self._changes: AttributeChanges = ()
        self._num_changes = 0

    def changes(self) -> AttributeChanges:
        """Return what differs from the first capture."""
        if len(self._reads) != self._num_reads:
            self._add_entries()
        values = [getattr(module, name, _MISSING) for module, name in self._pairs]
        if not (all(map(is_, values, self._last)) and self._contents_are_same()):
            self._changes = self._compare(values)
        return self._changes

    def copied_to(self, model: nn.Module) -> AttributeWatch:
        """Return the watch of a copy, which shares the captures."""
        before = self.changes()
        watch = AttributeWatch(model, self._reads)
        watch.changes()
        watch._baseline |= {path: self._baseline[path] for path, _ in before}
        watch._last = [_MISSING]
        return watch

    def _contents_are_same(self) -> bool:
        return all(_has_items(box, items) for box, items in self._containers) and all(
            private.version_of(x) == version for x, version in self._tensors
        )

    def _add_entries(self) -> None:
        self._num_reads = len(self._reads)
        names: dict[str, list[str]] = {}
        for kind, name in sorted(self._reads):
            names.setdefault(kind, []).append(name)
        for path, module in self._model.named_modules():
            tables = [*private.tensor_tables(module), private.submodules_of(module)]
            for name in names.get(class_name_of(type(module)), ()):
                if not any(name in table for table in tables):
                    self._entries.setdefault(f"{path}.{name}" if path else name, (module, name))
        self._pairs = list(self._entries.values())
        for path, (module, name) in self._entries.items():
            if path not in self._baseline:  # no capture has read it before
                self._baseline[path] = self._freeze(getattr(module, name, _MISSING))
        self._last = [_MISSING]  # compare all of them

    def _compare(self, values: list[Any]) -> AttributeChanges:
        self._last, self._containers, self._tensors = values, [], []
        frozen = dict(zip(self._entries, map(self._freeze, values), strict=True))
        changes = tuple((path, value) for path, value in frozen.items() if value != self._baseline[path])
        if changes and changes != self._changes:
            self._num_changes += 1
            if self._num_changes == _MANY_VALUES:
                warnings.warn(
                    f"{changes[0][0]} has had {_MANY_VALUES} values since the model was divided, each of which is captured anew; a loop "
                    "that changes it often is faster with a buffer (register_buffer), which it writes by .fill_()",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return changes

    def _freeze(self, value: Any, depth: int = 0) -> Hashable:
        """Return a value as a key, and watch the items of what is mutable in it."""
        if isinstance(value, float):
            return float, repr(value)
        if isinstance(value, _LITERALS):
            return type(value), value
        if isinstance(value, Tensor):
            if value.is_inference():  # which has no count of writes
                return _SameObject(value)
            self._tensors.append((value, private.version_of(value)))
            return _SameObject(value), private.version_of(value)
        items = _items_of(value) if depth < _MAX_DEPTH else None
        if items is None:
            return _SameObject(value)
        if not isinstance(value, tuple):
            self._containers.append((value, items))
        return (type(value), *(self._freeze(item, depth + 1) for item in items))


def _items_of(value: Any) -> list[Any] | None:
    """Return the items of a container or plain object; None for others and for large ones (data), which count by identity."""
    if isinstance(value, list | tuple | deque | set | frozenset | dict) and len(value) > _MAX_ITEMS:
        return None
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, dict):
        return [*value, *value.values()]
    is_plain = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value)
    return [*vars(value), *vars(value).values()] if is_plain else None


def _has_items(container: Any, items: list[Any]) -> bool:
    now = _items_of(container) or []
    return len(now) == len(items) and all(map(is_, now, items))
