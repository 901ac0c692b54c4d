"""Adapter for TRL trainers: `from shardwise.adapters.trl import SFTTrainer`. See `shardwise.adapters.transformers`."""

from __future__ import annotations

from typing import Any

from shardwise.adapters.optional_imports import import_required
from shardwise.adapters.transformers import trainer_of


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return trainer_of(getattr(import_required("trl", "trl"), name))
