"""Record which attributes of modules a model reads while it is traced, so that a change of one of them can be noticed later."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

AttributeRead = tuple[str, str]  # class of the module, name of the attribute
_MODULE_KEYS = set(vars(nn.Module()))  # torch's own, of which modes and hooks are followed elsewhere


@contextmanager
def record_attribute_reads(reads: set[tuple[type, str]]) -> Iterator[None]:
    """Add (class, name) of all attributes of modules that are read in a block to `reads`."""

    def record(self: nn.Module, name: str) -> Any:
        reads.add((type(self), name))
        return object.__getattribute__(self, name)

    setattr(nn.Module, "__getattribute__", record)  # noqa: B010  # a method to type checkers
    try:
        yield
    finally:
        del nn.Module.__getattribute__


def select_values(reads: Iterable[tuple[type, str]]) -> frozenset[AttributeRead]:
    """Return the reads of values: all but methods, properties and what torch keeps in every module."""
    return frozenset(
        (class_name_of(kind), name)
        for kind, name in reads
        if name not in _MODULE_KEYS
        and not hasattr(nn.Module, name)
        and not hasattr(inspect.getattr_static(kind, name, None), "__get__")  # functions, properties and other descriptors have it
    )


def class_name_of(kind: type) -> str:
    """Return the full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
