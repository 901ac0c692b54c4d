"""Broken twins that several tests of layouts have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from weft.run import build


def not_summed_over(monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    """From here on no gradient is summed over the axis."""
    shard = build.shard_of

    def without(*given: Any) -> Any:
        found = shard(*given)
        return replace(found, gradients={v: tuple(a for a in axes if a != axis) for v, axes in found.gradients.items()})

    monkeypatch.setattr(build, "shard_of", without)
