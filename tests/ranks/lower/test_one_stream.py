"""A model that draws random numbers has one loss, however it is divided: that of its own module on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwise.ops import is_random
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.verify.serial import SerialRun, SerialTraits
from shardwise.world.launch.launch import launch
from shardwise.world.world import World

STEPS = 3
GPT, EVERYTHING = "gpt-tiny:dropout=0.2,layers=2", "tests/support/drawing_models.py:everything"
LAYOUTS = {
    1: ["data=1", "microbatches=2", "microbatches=5", "microbatches=4 recompute=full"],
    2: [
        "data=2", "data=2 microbatches=2 zero=1", "tensor=2", "tensor=2 sequence_parallel=on microbatches=2",
        "pipeline=2 microbatches=4 recompute=selective", "pipeline=2 microbatches=4 schedule=chimera",
        "pipeline=2 microbatches=4 schedule=gems-master",
    ],
    4: ["data=4", "data=2 tensor=2 microbatches=2 zero=3", "data=2 pipeline=2 microbatches=3"],
}  # fmt: skip


def _losses(world: World, layouts: list[str], model: Any) -> list[list[float]]:
    found = []
    for text in layouts:
        plan = model.plan(replace(Layout.parse(text), precision="float64"))
        engine = Engine(plan, model.source, model.batch, model.loss, world, seed=0)
        found.append([engine.step(model.batch).loss for _ in range(STEPS)])
    return found


@pytest.mark.parametrize("name", [GPT, EVERYTHING])
def test_a_run_that_draws_has_one_loss_under_every_layout(subject: Callable[[str], Any], name: str) -> None:
    model = subject(name)
    plan = model.plan(Layout(precision="float64"))
    graph = model.source.capture(model.batch, model.loss, None).graph
    count = sum(is_random(op) for op in graph.operators)
    cpu = torch.device("cpu")
    serial = SerialRun(model.make, 0, model.batch, model.loss, plan, OptimizerSpec.of("adamw"), cpu, SerialTraits(num_draws=count))
    want = [float(serial.step()["loss"][""]) for _ in range(STEPS)]
    assert not serial.drew_differently
    assert len(set(want)) == STEPS
    for num_ranks, layouts in LAYOUTS.items():
        for text in layouts:
            model.source.prepare(model.plan(replace(Layout.parse(text), precision="float64")), model.batch, model.loss)
        found = launch(lambda world, these=layouts: _losses(world, these, model), num_ranks, show=False)[0]
        for layout, losses in zip(layouts, found, strict=True):
            assert losses == pytest.approx(want, rel=1e-9), layout
