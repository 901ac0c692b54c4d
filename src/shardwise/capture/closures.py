"""Functions that a module keeps, over its own layers: `self.block = lambda x: m.b(m.a(x))`.

`copy.deepcopy` leaves functions as they are, so that those of a copied module would read the layers of the original. Here they are made
anew over the copies: their closures (which may have other functions), defaults, partial arguments and bound objects. Not covered: layers
that a function reads by a global name.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import CellType, FunctionType, MethodType
from typing import Any, cast

from torch import nn

_MODULE_KEYS = set(vars(nn.Module()))


def rebind_functions(copied: nn.Module, copies: Mapping[int, Any]) -> None:
    """Rebind all functions in attributes of a copied module. `copies`: the copy by `id` of each original."""
    rebinding = _Rebinding(copies)
    for module in copied.modules():
        for key, value in list(vars(module).items()):
            if key not in _MODULE_KEYS and (bound := rebinding.rebind(value)) is not value:
                vars(module)[key] = bound


class _Rebinding:
    """Rebinds functions, each once; functions that share a variable share it in their copies."""

    def __init__(self, copies: Mapping[int, Any]) -> None:
        self._copies = copies
        self._done: dict[int, tuple[Any, Any]] = {}  # of each object by id, the object itself (so that it lives) and its rebound one

    def rebind(self, x: Any) -> Any:
        """Return a value over the copies; the value itself if it reaches none of their originals."""
        if isinstance(x, nn.Module):
            return self._copies.get(id(x), x)
        if id(x) in self._done:
            return self._done[id(x)][1]
        match x:
            case FunctionType() if x.__closure__ or x.__defaults__ or x.__kwdefaults__:
                return self._rebind_function(x)
            case MethodType():
                owner = self.rebind(x.__self__)
                return x if owner is x.__self__ else MethodType(x.__func__, owner)
            case functools.partial():
                function, *args = (self.rebind(item) for item in (x.func, *x.args))
                keywords = {name: self.rebind(value) for name, value in x.keywords.items()}
                is_same = _are_same((function, *args, *keywords.values()), (x.func, *x.args, *x.keywords.values()))
                return x if is_same else type(x)(function, *args, **keywords)
            case list() | tuple() if type(x) in (list, tuple):
                items = [self.rebind(item) for item in x]
                return x if _are_same(items, x) else type(x)(items)
            case dict() if type(x) is dict:
                values = [self.rebind(value) for value in x.values()]
                return x if _are_same(values, x.values()) else dict(zip(x, values, strict=True))
        return self._copies.get(id(x), x) if not isinstance(x, type) and hasattr(x, "__dict__") else x

    def _rebind_function(self, function: FunctionType) -> Any:
        self._done[id(function)] = function, function  # a function that reaches itself
        cells = tuple(self._rebind_cell(cell) for cell in function.__closure__ or ())
        defaults, keyword_defaults = self.rebind(function.__defaults__), self.rebind(function.__kwdefaults__)
        if (
            _are_same(cells, function.__closure__ or ())
            and defaults is function.__defaults__
            and keyword_defaults is function.__kwdefaults__
        ):
            return function
        bound = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
        bound.__kwdefaults__ = keyword_defaults
        bound.__dict__.update(function.__dict__)
        self._done[id(function)] = function, bound
        return bound

    def _rebind_cell(self, cell: CellType) -> CellType:
        if id(cell) in self._done:
            return cast(CellType, self._done[id(cell)][1])
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        bound = self.rebind(content)
        bound_cell = cell if bound is content else CellType(bound)
        self._done[id(cell)] = cell, bound_cell
        return bound_cell


def _are_same(items: Any, others: Any) -> bool:
    return all(item is other for item, other in zip(items, others, strict=True))
