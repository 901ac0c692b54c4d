"""Tests of one process, and of the processes that they start, know the machine as it was measured once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _known_machine(home: Path) -> None:
    """See `home`."""


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """The collector leaves out what was there before: each `gc.collect()` would look at a million objects, for a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
