"""Callable packages: `shardwise.plan(...)` chooses a plan, and the package `shardwise.plan` defines plans.

The user interface and the package layout use the same word; a module whose type has `__call__` serves as both.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        verb = self.__name__.rpartition(".")[2]
        home = "shardwise.cli.functions" if verb == "report" else "shardwise.api"
        return getattr(importlib.import_module(home), verb)(*args, **kwargs)


def make_callable(name: str) -> None:
    """Make the package `name` callable as the function of the same name in `shardwise.api`."""
    sys.modules[name].__class__ = _CallablePackage
