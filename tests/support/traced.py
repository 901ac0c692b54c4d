"""Models of rank tests, each traced once in a session, and how their training goes on from a checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardwise.run.engine import Engine
from tests.support.verified_models import Subject

ROOT = Path(__file__).resolve().parents[2]


def of(name: str, size: int = 8) -> Subject:
    """A model on a batch of so many samples."""
    torch.set_num_threads(1)
    return _traced(str(ROOT / name) if ".py" in name else name, size)


_traced = cache(Subject)


def weights_after(steps: int, engine: Engine, batch: Any, folder: Path, loads: bool) -> dict[str, list[float]]:
    """Weights by name after so many steps: of a run that leaves a checkpoint in the folder behind its first, or `loads` it before."""
    if loads:
        engine.load(folder)
    for step in range(steps):
        engine.step(batch)
        if step == 0 and not loads:
            engine.save(folder)
    return {name: x.flatten().tolist() for name, x in (engine.full_state_dict() or {}).items()}
