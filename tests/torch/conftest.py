"""Tests of one process, and of the processes that they start, know the machine as it was measured once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _known_machine(home: Path) -> None:
    """See `home`."""
