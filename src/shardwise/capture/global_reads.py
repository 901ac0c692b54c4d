"""Find the globals and closure variables that a model's own code reads, so that a change of one of them can be noticed later.

In: a module. Out: (what is read, the object that holds it, the attribute), for values alone: functions, classes and modules stay what
they are. Reads are found in the byte code of `forward`, and of the functions and methods that it names, outside of torch's own.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

_VALUES = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, Tensor, type(None))
_FOREIGN = ("torch.", "shardwise.", "numpy.", "math", "collections", "typing", "functools", "inspect", "warnings")


class ValueRead(NamedTuple):
    """A variable outside of a module that its code reads: `getattr(holder, attribute)` is its value now."""

    words: str
    holder: object
    attribute: str


class _Globals:
    """The globals of a function as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def find_value_reads(model: nn.Module) -> list[ValueRead]:
    """Return the globals and closure variables with values that the code of a model's parts reads, each once."""
    found: dict[tuple[int, str], ValueRead] = {}
    seen: set[int] = set()
    for module in model.modules():
        waiting: list[Any] = [type(module).forward, *(x for x in vars(module).values() if isinstance(x, FunctionType | MethodType))]
        while waiting:
            function = inspect.unwrap(waiting.pop())
            function = function.__func__ if isinstance(function, MethodType) else function
            if not isinstance(function, FunctionType) or id(function) in seen or _is_foreign(function):
                continue
            seen.add(id(function))
            for read in _reads_of(function):
                found.setdefault((id(read.holder.__dict__ if isinstance(read.holder, _Globals) else read.holder), read.attribute), read)
            waiting += _functions_named_in(function, type(module))
    return list(found.values())


def _is_foreign(function: FunctionType) -> bool:
    name = f"{function.__module__}."
    return name.startswith(_FOREIGN)


def _reads_of(function: FunctionType) -> Iterator[ValueRead]:
    names = function.__globals__
    for code in _codes_in(function.__code__):
        for instruction in dis.get_instructions(code):
            if instruction.opname == "LOAD_GLOBAL" and isinstance(names.get(instruction.argval, NotImplemented), _VALUES):
                yield ValueRead(f"the global {instruction.argval} of {function.__module__}", _Globals(names), instruction.argval)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if isinstance(_content_of(cell), _VALUES):
            yield ValueRead(f"the variable {name} of {function.__qualname__}", cell, "cell_contents")


def _functions_named_in(function: FunctionType, kind: type) -> list[Any]:
    """Return the functions that a function names: globals, methods of its class, variables of its closure."""
    named: list[Any] = [content for cell in function.__closure__ or () if callable(content := _content_of(cell))]
    for code in _codes_in(function.__code__):
        named += (function.__globals__.get(name) or inspect.getattr_static(kind, name, None) for name in code.co_names)
    return [x for x in named if isinstance(x, FunctionType | MethodType)]


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Return a code and those of the lambdas, comprehensions and functions in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes_in(inner)


def _content_of(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return NotImplemented
