"""The optimizer specification of the `[train]` section."""

from __future__ import annotations

from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.train.config import TrainSection


def optimizer_of(section: TrainSection) -> OptimizerSpec:
    """Build the optimizer specification of a configuration. Raises UsageError for an unknown optimizer."""
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
    """Raise UsageError if the optimizer cannot update shards independently, or an option is unknown."""
    _ = optimizer_of(section).slots
