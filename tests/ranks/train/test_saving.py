"""Checkpoints that ranks write while they train: those that they would have waited for, also where ranks are killed meanwhile."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recovery import Harm, lasting, train  # noqa: F401
from torch import nn

import shardwise
from shardwise.run import checkpoint
from shardwise.run.checkpoint import disk
from shardwise.run.engine import Engine
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.world.launch.launch import Launcher
from shardwise.world.world import World

LAYOUTS = ["data=2", "data=2 zero=1 offload=optimizer", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2", "data=2 compress=int8"]


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(8, 16), torch.randn(8, 4)


def engine_of(world: World, layout: str) -> Engine:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(output, batch[1])

    return shardwise.parallelize(make, batch=batch(0), loss=loss, optimizer="adamw", plan=layout, world=world, seed=0)


def saves_twice(world: World, layout: str, folder: str) -> tuple[dict[str, float], dict[str, float]]:
    """Saves after two steps, waiting and not; the weights after three steps, and after a third from what was not waited for."""
    engine = engine_of(world, layout)
    for step in range(2):
        engine.step(batch(step))
    engine.save(f"{folder}/waited")
    engine.begin_save(f"{folder}/beside")
    engine.step(batch(2))
    engine.finish_save()
    engine.finish_save()
    other = engine_of(world, layout)
    other.load(f"{folder}/beside")
    other.step(batch(2))
    weights = [one.full_state_dict() or {} for one in (engine, other)]
    return tuple({name: x.tolist() for name, x in one.items()} for one in weights)  # type: ignore[return-value]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_while_steps_go_on_is_of_the_step_before_them(ranks: Callable[..., list[Any]], tmp_path: Path, layout: str) -> None:
    went_on, loaded = ranks(saves_twice, 2, layout, str(tmp_path))[0]
    assert went_on == loaded
    folders = [tmp_path / name / "step-00000002" for name in ("waited", "beside")]
    waited, beside = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert waited == beside
    assert not list((tmp_path / "beside").glob(".*"))


def disk_is_slow(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """What a rank runs, but that every file of a checkpoint takes a while, as large ones do."""
    real = disk.write_file

    def write_file(path: Path, parts: Any) -> tuple[int, str]:
        if path.suffix == ".safetensors":
            time.sleep(0.05)
        return real(path, parts)

    disk.write_file = write_file
    return loop.train(world, flow.job_of(world, folder, peak_flops))


def test_ranks_that_are_killed_while_they_save_leave_whole_checkpoints_or_none(
    tmp_path: Path,
    train: Callable[[TrainingConfig], list[float]],  # noqa: F811
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calm = train(lasting(tmp_path / "calm", "data=2 zero=1", protect="none"))
    harmed = lasting(tmp_path / "harmed", "data=2 zero=1")
    harmed = harmed.model_copy(update={"train": harmed.train.model_copy(update={"checkpoint_every": 2, "keep": 99})})
    monkeypatch.setattr(flow, "rank_main", disk_is_slow)
    with Harm(launcher, harmed, (3, 8, 13, 20, 27), signal.SIGKILL) as harm:
        assert train(harmed) == calm
    assert harm.done == 5
    folder = Path(harmed.run.folder) / "checkpoints"
    saved = checkpoint.committed_checkpoints(folder)
    assert saved[-1].step == harmed.train.steps
    assert len(saved) > 5
    for one in saved:
        checkpoint.verify(folder / one.name)
    assert not list(folder.glob(".saving-*"))
