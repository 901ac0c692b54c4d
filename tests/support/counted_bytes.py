"""Bytes that ranks really hold, to be set beside priced ones."""

from __future__ import annotations

import gc

from shardwise.plan.plan_file import parse_plan
from shardwise.run.engine import Engine
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve


def count_bytes(
    world: World, name: str, rows: int, plans: list[str], num_steps: int = 1, optimizer: str = "adamw"
) -> list[dict[str, float]]:
    """Peak bytes of the fullest rank by part, and their total, in the last of some steps on `rows` samples, by plan file's text."""
    model, counted = resolve(name), []
    for text in plans:
        engine = Engine(parse_plan(text), model.make, model.batch(rows), model.loss, world, OptimizerSpec.of(optimizer), seed=0)
        for number in range(num_steps):
            if number:
                engine.memory.reset_peak()
            engine.step(model.batch(rows))
        counted.append(engine.peak_memory_over_ranks())
        del engine
        gc.collect()  # what hooks refer to
    return counted
