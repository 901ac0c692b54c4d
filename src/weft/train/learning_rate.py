"""The learning rate of every step, in closed form. In: the step and the `[train]` section. Out: a number."""

from __future__ import annotations

from math import cos, pi

from weft.train.config import TrainSection


def learning_rate(step: int, section: TrainSection) -> float:
    """Linear warm-up over the first `warmup_steps`, then from `learning_rate` down to `min_learning_rate` at `steps`.

    The step counts from 0, so that the first step of a warm-up already learns.

    >>> section = TrainSection(steps=10, warmup_steps=2, learning_rate=1.0, schedule="linear")
    >>> [learning_rate(step, section) for step in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < section.warmup_steps:
        return section.learning_rate * (step + 1) / section.warmup_steps
    part = min(1.0, (step - section.warmup_steps) / max(1, section.steps - section.warmup_steps))
    match section.schedule:
        case "cosine":
            share = 0.5 * (1 + cos(pi * part))
        case "linear":
            share = 1 - part
        case "constant":
            share = 1.0
    return section.min_learning_rate + (section.learning_rate - section.min_learning_rate) * share
