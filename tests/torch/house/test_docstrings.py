"""Every example in a docstring of shardwise is run; `tests/pure` does those that need no torch without it."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import shardwise

LEAST = 300  # examples; fewer would mean that they are not found


def test_examples_of_all_modules() -> None:
    names = [m.name for m in pkgutil.walk_packages(shardwise.__path__, "shardwise.") if "__main__" not in m.name]
    runner = doctest.DocTestRunner(verbose=False)
    docstrings = (each for name in names for each in doctest.DocTestFinder().find(importlib.import_module(name), name))
    wrong = [each.name for each in docstrings if each.examples and runner.run(each).failed]  # the others, most, would take 2 ms each
    assert runner.tries > LEAST
    assert wrong == []
