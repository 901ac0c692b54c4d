"""Runs whose ranks are killed, stopped or hang: they end with the losses of the run that nothing touched, bit for bit, and leave nobody.

A second thread does the harm, at moments drawn from a seed; what it harms it finds as the launcher's descendants.
"""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import configure, losses, planner

from shardwise.errors import RankError
from shardwise.run.checkpoint.folder import token_of
from shardwise.run.engine import Engine
from shardwise.run.step.dispatch import StepResult
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.train.training_task import TrainingTask
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World
from tests.support.processes import children_of

STEPS = 40


@pytest.fixture
def train(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainingConfig], list[float]]:
    """Trains in the session's prepared process; returns the losses."""
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))

    def run(config: TrainingConfig) -> list[float]:
        summary = flow.train(config, planner)
        assert summary["step"] == config.train.steps
        return [*losses(config), *losses(config, "eval_loss")]

    return run


def lasting(folder: Path, layout: str, **run: Any) -> TrainingConfig:
    config = configure(folder, layout, steps=STEPS, checkpoint_every=15, evaluate_every=20)
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def ranks_of(launcher: Launcher) -> list[int]:
    """The processes of the ranks, which the prepared process's child forked."""
    return sorted(pid for nest in children_of(launcher.pid or 0) for pid in children_of(nest))


def rows(config: TrainingConfig) -> int:
    path = Path(config.run.folder) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Harm:
    """Does something to a rank, drawn at random, each time that so many steps have been told."""

    def __init__(
        self, launcher: Launcher, config: TrainingConfig, at: tuple[int, ...], number: signal.Signals, seed: int = 0, of_all: bool = False
    ) -> None:
        self.done, self._of_all = 0, of_all
        self._thread = threading.Thread(target=self._work, args=(launcher, config, at, number, random.Random(seed)), daemon=True)

    def __enter__(self) -> Harm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _work(self, launcher: Launcher, config: TrainingConfig, at: tuple[int, ...], number: signal.Signals, draw: random.Random) -> None:
        for step in at:
            until = time.monotonic() + 60
            while (rows(config) < step or not ranks_of(launcher)) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.02))
            if ranks := ranks_of(launcher):
                for pid in ranks if self._of_all else [draw.choice(ranks)]:
                    os.kill(pid, number)
                self.done += 1


LAYOUTS = [
    "data=2 zero=1",
    "data=2",
    "data=2 zero=2",
    "data=2 zero=3 microbatches=2",
    "tensor=2",
    "pipeline=2 microbatches=4",
    "pipeline=2 microbatches=4 schedule=zb-h1",
    "pipeline=2 microbatches=4 schedule=interleaved chunks=2",
    "pipeline=2 microbatches=4 schedule=chimera",
    "data=2 pipeline=2 microbatches=2 zero=1 offload=optimizer",
    "data=2 tensor=2 recompute=full",
    "data=2 zero=1 compress=int8",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_ranks_cost_no_bit(tmp_path: Path, train: Callable[[TrainingConfig], list[float]], launcher: Launcher, layout: str) -> None:
    calm = train(lasting(tmp_path / "calm", layout, protect="none"))
    harmed = lasting(tmp_path / "harmed", layout)
    with Harm(launcher, harmed, (3, 9, 15, 20), signal.SIGKILL, seed=len(layout)) as harm:
        assert train(harmed) == calm
    assert harm.done == 4
    assert token_of(Path(lasting(tmp_path / "harmed", layout).run.folder) / "checkpoints") == 1  # its ranks have gone on as one writer


def test_all_ranks_at_once_several_times_cost_no_bit(
    tmp_path: Path, train: Callable[[TrainingConfig], list[float]], launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one loss is allowed at a step, four ranks that are killed together are that one."""
    policy = flow.RecoveryPolicy
    monkeypatch.setattr(flow, "RecoveryPolicy", lambda **options: policy(max_losses=1, **options))
    layout = "data=2 pipeline=2 microbatches=2 zero=1"
    calm = train(lasting(tmp_path / "calm", layout, protect="none"))
    harmed = lasting(tmp_path / "harmed", layout)
    with Harm(launcher, harmed, (3, 9, 20), signal.SIGKILL, of_all=True) as harm:
        assert train(harmed) == calm
    assert harm.done == 3


def test_ranks_of_several_hosts_cost_no_bit(
    tmp_path: Path, train: Callable[[TrainingConfig], list[float]], launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank as if on a host of its own: who is not lost keeps its process, though gloo would let it wait."""
    over_gloo = {"SHARDWISE_TRANSPORT": "gloo"}
    monkeypatch.setattr(
        flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(env=over_gloo, **options))
    )
    layout = "data=2 zero=1"
    calm = train(lasting(tmp_path / "calm", layout, protect="none"))
    harmed = lasting(tmp_path / "harmed", layout)
    with Harm(launcher, harmed, (3, 20), signal.SIGSTOP) as harm:
        assert train(harmed) == calm
    assert harm.done == 2


@pytest.mark.parametrize("layout", ["data=2 zero=1", "pipeline=2 microbatches=4 schedule=zb-h1"])
def test_stopped_ranks_cost_no_bit(tmp_path: Path, train: Callable[[TrainingConfig], list[float]], launcher: Launcher, layout: str) -> None:
    calm = train(lasting(tmp_path / "calm", layout, protect="none"))
    harmed = lasting(tmp_path / "harmed", layout)
    with Harm(launcher, harmed, (3, 20), signal.SIGSTOP) as harm:
        assert train(harmed) == calm
    assert harm.done == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_where_all_are_lost_the_last_checkpoint_is_gone_on_from(
    tmp_path: Path, train: Callable[[TrainingConfig], list[float]], launcher: Launcher, number: signal.Signals
) -> None:
    """The process that forks the ranks holds what outlives them."""
    calm = train(lasting(tmp_path / "calm", "data=2", protect="none"))
    harmed = lasting(tmp_path / "harmed", "data=2")

    def lose() -> None:
        until = time.monotonic() + 60
        while rows(harmed) < 18 and time.monotonic() < until:
            time.sleep(0.001)
        for nest in children_of(launcher.pid or 0):
            os.kill(nest, number)

    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    assert train(harmed) == calm
    thread.join()


def goes_wrong(world: World, folder: str, peak_flops: float, how: str) -> dict[str, Any]:
    """What a rank runs, but that in step 13, the first time that it is made, memory or arithmetic is at fault."""
    past: list[int] = []

    def make(world: World, job: loop.TrainingJob, subject: TrainingTask) -> Engine:
        engine = loop.make_engine(world, job, subject)
        steps = engine.step

        def step(batch: Any, **options: Any) -> StepResult:
            now = engine.step_index == 12 and not past
            if now:
                past.append(1)
            if now and world.rank == 1 and how == "flip":
                engine.rank_model.parameters["layers.1.mlp.up.weight"].data.view(torch.int32)[3, 2] ^= 1 << 7
            result = steps(batch, **options)
            return replace(result, total=result.total * (math.nan if how == "nan" else 50)) if now and how != "flip" else result

        engine.step = step  # type: ignore[method-assign]
        return engine

    return loop.train(world, flow._read_job(Path(folder), peak_flops), make)


def flips(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return goes_wrong(world, folder, peak_flops, "flip")


def is_nan_once(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return goes_wrong(world, folder, peak_flops, "nan")


def jumps_once(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return goes_wrong(world, folder, peak_flops, "jump")


WRONG = {
    flips: "step 13: a bit was flipped in layers.1.mlp.up.weight on rank 1; it is rerun from the snapshot before it",
    is_nan_once: "step 13: the loss is nan; it is rerun",
    jumps_once: "step 13: the loss went up to",
}


def test_what_memory_or_arithmetic_got_wrong_is_made_again(
    tmp_path: Path, train: Callable[[TrainingConfig], list[float]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    calm = train(lasting(tmp_path / "calm", "data=2"))
    assert "is rerun" not in capfd.readouterr().err
    for wrong, said in WRONG.items():
        monkeypatch.setattr(flow, "rank_main", wrong)
        assert train(lasting(tmp_path / wrong.__name__, "data=2")) == calm
        assert said in capfd.readouterr().err


def test_without_a_state_to_go_back_to_replicas_that_differ_end_the_run(
    tmp_path: Path, train: Callable[[TrainingConfig], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "rank_main", flips)
    with pytest.raises(RankError, match="rank 0, 1 have other weights than their replicas"):
        train(lasting(tmp_path / "flipped", "data=2", protect="none"))
