"""Peeking at the first batch of a `DataLoader` before the loop starts, without changing the state of any random generator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


def first_batch(loader: DataLoader[Any]) -> Any:
    """Return the first batch, restoring the generators of the loader, Python, NumPy and torch."""
    batches = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    generators = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)}
    states = {key: g.get_state() for key, g in generators.items()}
    try:
        with preserve_random_state():
            return next(iter(loader))
    finally:
        for key, g in generators.items():
            g.set_state(states[key])


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch after the block."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
