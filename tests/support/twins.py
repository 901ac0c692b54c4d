"""Broken twins that several tests of layouts have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.run.rank_model import model_source


def not_summed_over(monkeypatch: pytest.MonkeyPatch, axis: str) -> None:
    """From here on no gradient is summed over the axis."""
    shard = model_source.shard_graph

    def without(*given: Any) -> Any:
        found = shard(*given)
        return replace(found, gradient_axes={v: tuple(a for a in axes if a != axis) for v, axes in found.gradient_axes.items()})

    monkeypatch.setattr(model_source, "shard_graph", without)
