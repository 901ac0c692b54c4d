"""What keeping the state and saving it take: as the plan says, and, where that is not free, told and left out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_train import configure, planner

from shardwise.run.checkpoint import host_copy_bytes
from shardwise.run.recovery.snapshots import required_bytes
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.train.recovery import anomalies
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World

LAYOUTS = ["data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2"]


def rooms(world: World, folder: str) -> tuple[tuple[int, float], tuple[int, float]]:
    """(bytes that this rank's snapshots take, bytes that the plan says); the same of the copy that is saved."""
    job = flow._read_job(Path(folder), 0.0)
    engine = loop.make_engine(world, job, loop.training_task_of(job.config, job.corpus))
    prediction = job.plan.prediction
    assert prediction is not None
    return (required_bytes(engine.state()), job.plan.protection_bytes), (
        host_copy_bytes(engine.state_shards()),
        prediction.memory.async_save_bytes,
    )


def prepared(folder: Path, layout: str) -> TrainingConfig:
    config = configure(folder, layout)
    name = f"{config.model.name},sequence=16"  # whose positions are as many as are trained on
    config = config.model_copy(update={"model": config.model.model_copy(update={"name": name})})
    folder.mkdir(parents=True)
    flow.prepare_run_folder(config, folder, planner)
    return config


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_says_what_it_takes(tmp_path: Path, ranks: Callable[..., list[Any]], layout: str) -> None:
    """Of the fullest rank, but for counters and what makes every tensor end at 64 bytes."""
    prepared(tmp_path / "run", layout)
    found = ranks(rooms, 2, str(tmp_path / "run"))
    for each in zip(*found, strict=True):
        most, said = max(size for size, _ in each), each[0][1]
        assert most == pytest.approx(said, rel=0.05)


def crowded(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    anomalies.available_bytes = lambda: 1e6
    return loop.train(world, flow.job_of(world, folder, peak_flops))


def test_where_there_is_no_room_it_is_said(
    tmp_path: Path, launcher: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))
    monkeypatch.setattr(flow, "rank_main", crowded)
    assert flow.train(configure(tmp_path / "run", "data=2", steps=2), planner)["step"] == 2
    said = capfd.readouterr().err
    assert "the state is not in persistent memory: 2 ranks need" in said
    assert "977 KiB that are free on their host" in said or "1.0 MB that are free" in said
