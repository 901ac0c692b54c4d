"""A rank that takes longer than its like is named, with the part of the run that the others lose; ranks that are all slow are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_train import configure, planner

from shardwise.report.run_folder import read_folder
from shardwise.run.engine import Engine
from shardwise.run.step.dispatch import StepResult
from shardwise.train import flow, loop
from shardwise.train.training_task import TrainingTask
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World

PAUSE_S = 0.05


def _late(world: World, folder: str, peak_flops: float, ranks: tuple[int, ...]) -> dict[str, Any]:
    def make(world: World, job: loop.TrainingJob, subject: TrainingTask) -> Engine:
        engine = loop.make_engine(world, job, subject)
        step = engine.step

        def late(batch: Any, **options: Any) -> StepResult:
            time.sleep(PAUSE_S if world.rank in ranks else 0.0)
            return step(batch, **options)

        engine.step = late  # type: ignore[method-assign]
        return engine

    return loop.train(world, flow.job_of(world, folder, peak_flops), make)


def one_is_late(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return _late(world, folder, peak_flops, (1,))


def all_are_late(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return _late(world, folder, peak_flops, (0, 1))


@pytest.mark.parametrize(("main", "layout", "named"), [(one_is_late, "data=2", ["1"]), (all_are_late, "tensor=2", [])])
def test_who_is_late_is_named(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, main: Callable[..., Any], layout: str, named: list[str]
) -> None:
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))
    monkeypatch.setattr(flow, "rank_main", main)
    config = configure(tmp_path / "run", layout, steps=100, evaluate_every=0, checkpoint_every=0)
    summary = flow.train(config, planner)
    assert list(summary["waited_for"]) == named
    if named:
        assert 0.3 < summary["waited_for"]["1"] <= 1.0
        (tmp_path / "run" / "summary.json").write_text('{"waited_for": {"1": 0.75}}')
        assert "the others waited for rank 1, 75.0 % of the time" in read_folder(tmp_path / "run").lead
