"""Every example in a docstring of shardwise is run; `tests/pure` does those that need no torch without it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import shardwise

LEAST = 300  # examples; fewer would mean that they are not found


def test_examples_of_all_modules() -> None:
    names = [m.name for m in pkgutil.walk_packages(shardwise.__path__, "shardwise.") if "__main__" not in m.name]
    found = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(each.attempted for each in found) > LEAST
    assert sum(each.failed for each in found) == 0
