"""Steps of many microbatches in which a rank is killed: what is left of them is run, not all, and the run ends with the losses and weights
of the one that nothing touched, bit for bit.

The rank kills itself behind the backward of a microbatch, once the others are almost as far, which a file tells that all ranks write.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_train import configure, losses, planner

from shardwise.plan.ir.step_remainder import NEVER
from shardwise.run.engine import Engine
from shardwise.run.step.stage_runner import SavedActivations, StageRunner
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.train.recovery.resumable_steps import ResumableSteps
from shardwise.train.training_task import TrainingTask
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World

MICROBATCHES, STEPS = 8, 4
STEP, LAST = 2, 5  # in which rank 1 dies, and after which microbatch
WAIT_S = 20.0


def told(folder: Path) -> list[tuple[int, int, int, int]]:
    """(generation, step, microbatch, rank) of every backward."""
    return [tuple(map(int, line.split())) for line in (folder / "backwards").read_text().splitlines()]  # type: ignore[misc]


def interrupted(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """What a rank runs, but that gradients are kept whatever that costs, and that rank 1 is killed in its first life."""
    whole, where = StageRunner.backward, Path(folder) / "backwards"
    generation = [world.generation]

    def backward(runner: StageRunner, saved: SavedActivations, *args: Any) -> Any:
        out = whole(runner, saved, *args)
        step, m = runner.draw.step, runner.draw.microbatch
        with where.open("a") as file:
            file.write(f"{generation[0]} {step} {m} {world.rank}\n")
        if (generation[0], step, m, world.rank) == (0, STEP, LAST, 1):
            until = time.monotonic() + WAIT_S
            while not any(row[1:] == (STEP, LAST - 1, 0) for row in told(Path(folder))) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.02)  # in which its gradients are kept
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    def make(world: World, job: loop.TrainingJob, subject: TrainingTask) -> Engine:
        engine = loop.make_engine(world, job, subject)
        engine.resumption.max_time_share, engine.resumption.min_step_time_s, generation[0] = 1e9, 0.0, world.generation
        return engine

    StageRunner.backward = backward  # type: ignore[method-assign]
    return loop.train(world, flow._read_job(Path(folder), peak_flops), make)


@pytest.fixture
def train(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[float], dict[str, bytes]]]:
    """Trains in the session's prepared process; returns the losses, and the files of the last checkpoint."""
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))

    def run(config: TrainingConfig, *main: Any) -> tuple[list[float], dict[str, bytes]]:
        with monkeypatch.context() as patched:
            if main:
                patched.setattr(flow, "rank_main", *main)
            assert flow.train(config, planner)["step"] == STEPS
        saved = max((Path(config.run.folder) / "checkpoints").glob("step-*"))
        files = {path.name: path.read_bytes() for path in saved.rglob("*") if path.suffix == ".safetensors"}
        assert files
        return losses(config), files

    return run


LAYOUTS = [
    "data=2 microbatches=8",
    "tensor=2 microbatches=8",
    "pipeline=2 microbatches=8",
    "pipeline=2 microbatches=8 schedule=zb-h1",
    "data=2 microbatches=8 zero=2",
    "data=2 microbatches=8 zero=3 precision=float16",
    "data=2 microbatches=8 zero=1 compress=int8",
    "pipeline=2 microbatches=8 schedule=interleaved chunks=2",
    "pipeline=2 microbatches=8 schedule=chimera",
    "pipeline=2 microbatches=8 schedule=gpipe offload=activations",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_left_of_a_step_is_run(tmp_path: Path, train: Callable[..., Any], capfd: pytest.CaptureFixture[str], layout: str) -> None:
    calm = train(configure(tmp_path / "calm", layout, steps=STEPS, batch=16))
    harmed = configure(tmp_path / "harmed", layout, steps=STEPS, batch=16)
    assert train(harmed, interrupted) == calm
    again = {m for generation, step, m, _ in told(Path(harmed.run.folder)) if generation and step == STEP}
    assert again == set(range(min(again), MICROBATCHES))
    assert f"step {STEP + 1} goes on after {min(again)} of its microbatches" in capfd.readouterr().err
    assert 1 <= min(again) <= LAST + 1


def test_a_new_generation_has_measured_nothing_when_it_tells_of_the_step_before_it() -> None:
    """A rank that was lost where ranks agree after a step: its row is told before the new engine has made one."""
    timed: list[float] = []
    resumption = SimpleNamespace(record_time=timed.append, preferred_interval=lambda: 3 if timed else NEVER)
    engine: Any = SimpleNamespace(phase_times_s={}, resumption=resumption)
    asked = ResumableSteps(SimpleNamespace(), engine, print)  # type: ignore[arg-type]
    assert asked.preferred_interval(True) == NEVER
    engine.phase_times_s["program"] = 0.5
    assert (asked.preferred_interval(True), timed) == (3, [0.5])
