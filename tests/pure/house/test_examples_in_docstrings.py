"""Every example in a docstring of the parts that need no torch is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

PACKAGES = ("shardwise.plan", "shardwise.schedules", "shardwise.simulate")
ALONE = ("shardwise.units", "shardwise.report.gantt")


def modules() -> list[str]:
    found = [*PACKAGES, *ALONE]
    for package in PACKAGES:
        found += [m.name for m in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")]
    return sorted(found)


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    assert sum(doctest.testmod(importlib.import_module(name)).attempted for name in modules()) > 30
