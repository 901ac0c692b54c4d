"""One rank goes on with a step from what it has kept, against the step that nothing interrupts; and what is only made again says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.plan.layout import Layout
from shardwise.plan.plan import MemoryBreakdown, Plan, Prediction
from shardwise.run.engine import Engine
from shardwise.run.step.stage_runner import StageRunner
from shardwise.world import recorder
from shardwise.world.persistent_memory import PersistentMemory, create_memory_files
from shardwise.world.recorder import CollectiveRecorder
from shardwise.world.world import RecoveryContext, World

BATCH = (torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Normalises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x))
        return out


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


class Interrupted(Exception):
    """In the place of a lost rank."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    recorder.create_record_file(tmp_path / "record", 1)
    made = World(recorder=CollectiveRecorder(tmp_path / "record", 0))
    made.recovery = RecoveryContext(PersistentMemory(0, create_memory_files(1)), None, lambda generation: made)
    return made


def engine_of(model: type[nn.Module], world: World, words: str = "microbatches=8") -> Engine:
    return Engine(Plan(Layout.parse(words), "m", "c", 16), model, BATCH, loss, world, "sgd", seed=0)


@pytest.mark.parametrize("words", ["microbatches=8", "microbatches=8 schedule=gpipe", "microbatches=8 schedule=zb-h1"])
def test_random_numbers_losses_and_gradients_are_those_of_the_whole_step(words: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice interrupted, the second time while it is gone on with."""
    calm = engine_of(Drops, World(), words)
    want = [calm.step(BATCH, lr=0.1).loss for _ in range(3)]
    ran: list[int] = []
    backward = StageRunner.backward

    def interrupted(runner: StageRunner, *args: Any) -> Any:
        ran.append(runner.draw.microbatch)
        if len(ran) in (6, 10):
            raise Interrupted
        return backward(runner, *args)

    first = engine_of(Drops, world, words)
    got = [first.step(BATCH, lr=0.1).loss]
    weights = {name: p.detach().clone() for name, p in first.parameters.items()}
    first.resumption.set_interval(2)
    monkeypatch.setattr(StageRunner, "backward", interrupted)
    with pytest.raises(Interrupted):
        first.step(BATCH, lr=0.1)
    for after in (4, 6):
        engine = engine_of(Drops, world, words)
        for name, p in engine.parameters.items():
            p.data.copy_(weights[name])
        engine.step_index = 1
        engine.resumption.vote(1)
        assert engine.resumption.resume_point == (1, after)
        if after == 4:
            with pytest.raises(Interrupted):
                engine.step(BATCH, lr=0.1)
    got += [engine.step(BATCH, lr=0.1).loss for _ in range(2)]
    assert ran == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, *range(8)]
    assert got == want
    for name, p in engine.parameters.items():
        assert p.equal(calm.parameters[name])


def test_a_step_whose_forward_writes_is_made_again_and_says_why(world: World) -> None:
    engine = engine_of(Normalises, world)
    assert "forward writes norm.num_batches_tracked, norm.running_mean, norm.running_var" in engine.resumption.why_not_resumable
    engine.resumption.set_interval(2)
    engine.step(BATCH, lr=0.1)
    assert world.recorder.gradient_marks() == [(0, 0)]


def test_short_steps_keep_nothing_and_long_ones_as_often_as_a_hundredth_allows(world: World) -> None:
    finishing = engine_of(Drops, world).resumption
    finishing.record_time(0.08)
    assert finishing.preferred_interval() >= 8
    finishing.min_step_time_s = 0.0
    finishing.copy_s = 0.0003  # of microbatches of 10 ms, a hundredth of three
    assert finishing.preferred_interval() == 3


def test_a_plan_counts_gradients_where_a_step_is_gone_on_with() -> None:
    memory = MemoryBreakdown(parameters=4e7, gradients=4e7, optimizer=8e7)
    bytes_of = [
        Plan(Layout.parse(f"microbatches={count}"), "m", "c", 16, prediction=Prediction(step_s, 0, 0, memory)).protection_bytes
        for count, step_s in ((16, 20.0), (16, 0.5), (1, 20.0))
    ]
    assert [size - bytes_of[1] for size in bytes_of] == [2 * 4e7, 0, 0]
