"""The optimizer that a configuration names. In: the `[train]` section. Out: its specification, and what it keeps of every parameter."""

from __future__ import annotations

from weft.run.state.optimizer import OptimizerSpec
from weft.train.config import TrainSection


def optimizer_of(section: TrainSection) -> OptimizerSpec:
    """Raises UsageError for an unknown optimizer."""
    return OptimizerSpec(
        name=section.optimizer.lower(),
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        betas=section.betas,
        momentum=section.momentum,
        clip=section.clip,
        decay=section.decay,
        options=tuple(sorted((name, tuple(x) if isinstance(x, list) else x) for name, x in section.optimizer_options.items())),
    )


def check_optimizer(section: TrainSection) -> None:
    """Raise UsageError where ranks cannot update their pieces by themselves, or where an option is unknown."""
    _ = optimizer_of(section).slots
