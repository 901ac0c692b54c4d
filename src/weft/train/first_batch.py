"""The first batch of a loader, before the loop begins: behind it random numbers go on as if nobody had looked.

In: a `DataLoader`. Out: its first batch. Its workers, its shuffling and what its data set draws take none of the loop's random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader


def first_batch(loader: DataLoader[Any]) -> Any:
    """The first batch; the loader's own generators then are where they were, and those of Python, NumPy and torch."""
    batches = getattr(loader, "batch_sampler", None)
    places = [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    generators = {id(g): g for g in (getattr(place, "generator", None) for place in places) if isinstance(g, torch.Generator)}
    states = {key: g.get_state() for key, g in generators.items()}
    try:
        with nothing_drawn():
            return next(iter(loader))
    finally:
        for key, g in generators.items():
            g.set_state(states[key])


@contextmanager
def nothing_drawn() -> Iterator[None]:
    """A block behind which random numbers go on as if it had not been."""
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
