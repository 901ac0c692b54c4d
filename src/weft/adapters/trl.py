"""Adapter for TRL trainers: `from weft.adapters.trl import SFTTrainer`. See `weft.adapters.transformers`."""

from __future__ import annotations

from typing import Any

from weft.adapters.required import required
from weft.adapters.transformers import trainer_of


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return trainer_of(getattr(required("trl", "trl"), name))
