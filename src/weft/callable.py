"""Callable packages: `weft.plan(...)` chooses a plan, and the package `weft.plan` defines plans.

The user interface and the package layout use the same word; a module whose type has `__call__` serves as both.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verb = self.__name__.rpartition(".")[2]
        home = "weft.api_verbs" if verb == "report" else "weft.api"
        return getattr(importlib.import_module(home), verb)(*args, **kwargs)


def make_callable(name: str) -> None:
    """Make the package `name` callable as the function of the same name in `weft.api`."""
    sys.modules[name].__class__ = _Callable
