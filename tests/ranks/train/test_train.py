"""Whole runs on real ranks: killed, stopped and moved to other layouts, they compute what a run that nothing touched computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from shardwise import api
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import read_plan
from shardwise.run import checkpoint
from shardwise.train import flow
from shardwise.train.config import TrainingConfig
from shardwise.train.flow import PlannedRun
from shardwise.train.metrics import read_metrics
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World

TEXT = b"Whoever makes a thing twice has found a way to make it three times. " * 120
CONFIG = """
[model]
name = "gpt:vocabulary=256,hidden=32,layers=2,heads=2"
[data]
sequence = 16
[train]
steps = 12
batch = 8
learning_rate = 0.01
checkpoint_every = 3
evaluate_every = 6
evaluate_batches = 2
clip = 0.5
[run]
sample = 4
"""


def configure(folder: Path, layout: str, **train: Any) -> TrainingConfig:
    text = folder.parent / "text.txt"
    text.write_bytes(TEXT)
    config = TrainingConfig.parse(CONFIG, changes=[f"data.text={text}", f"run.folder={folder}", f"plan.layout={layout} threads=1"])
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def planner(config: TrainingConfig, known: Plan | None) -> PlannedRun:
    plan = known or api.plan(config.model.name, config.train.batch, cluster="2xcpu-2", layout=config.plan.layout)
    return PlannedRun(replace(plan, batch_size=config.train.batch), 1e9, "cpu")


@pytest.fixture
def run(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainingConfig], dict[str, Any]]:
    """Trains in the session's prepared process."""
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, options=LaunchOptions(**options)))
    return lambda config: flow.train(config, planner)


def losses(config: TrainingConfig, key: str = "loss") -> list[float]:
    rows = read_metrics(Path(config.run.folder) / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row[key] for row in rows if key in row]  # type: ignore[misc]


LAYOUTS = ["data=2 zero=1", "tensor=2", "data=2 pipeline=2 microbatches=2", "data=2 microbatches=2"]


def test_any_layout_learns_the_same_and_goes_on_under_any_other(tmp_path: Path, run: Callable[[TrainingConfig], dict[str, Any]]) -> None:
    """One run that changes its layout every three steps, against a run of one rank: same data, same weights, same curve."""
    moved = configure(tmp_path / "moved", "data=1")
    for number, layout in enumerate(LAYOUTS):
        # The learning rate's schedule must not move with the steps made so far.
        moved = configure(tmp_path / "moved", layout, steps=3 * number + 3, schedule="constant")
        run(moved)
    constant = configure(tmp_path / "constant", "data=1", schedule="constant")
    run(constant)
    assert losses(moved) == pytest.approx(losses(constant), rel=2e-5)
    mine, theirs = (load_file(Path(c.run.folder) / "model.safetensors") for c in (moved, constant))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-3


def test_killed_and_stopped_it_computes_the_same_bits(tmp_path: Path, run: Callable[[TrainingConfig], dict[str, Any]]) -> None:
    whole = configure(tmp_path / "whole", "data=2 zero=1")
    run(whole)
    broken = configure(tmp_path / "broken", "data=2 zero=1")
    for end in (signal.SIGKILL, signal.SIGTERM):
        launcher = subprocess.Popen([sys.executable, __file__, str(tmp_path / "broken")], stderr=subprocess.PIPE, text=True)
        wait_for_steps(Path(broken.run.folder), 5 if end == signal.SIGKILL else 8, launcher)
        launcher.send_signal(end)
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == (-9 if end == signal.SIGKILL else 0), said
        if end == signal.SIGTERM:
            assert "told to stop" in said
    steps = [saved.step for saved in checkpoint.committed_checkpoints(Path(broken.run.folder) / "checkpoints")]
    assert 3 <= steps[-1] < 12
    summary = run(broken)
    assert summary["step"] == 12
    assert losses(broken) == losses(whole)
    assert losses(broken, "grad_norm") == losses(whole, "grad_norm")
    assert losses(broken, "eval_loss") == losses(whole, "eval_loss")
    mine, theirs = (load_file(Path(c.run.folder) / "model.safetensors") for c in (broken, whole))
    assert all(mine[name].equal(theirs[name]) for name in theirs)


ORDERS = "0F1 0F0 0B1 0F2 0B0 0F3 0B3 0B2\n1F1 1B1 1F0 1B0 1F2 1F3 1B3 1B2\n", "0F0 0B0\n1F0 1B0\n"


def test_a_schedule_of_ones_own_is_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[TrainingConfig], dict[str, Any]]
) -> None:
    """What becomes of the file after planning is no matter to a run that goes on; a new plan reads the file."""
    monkeypatch.chdir(tmp_path)
    file, folder = Path("mine.txt"), tmp_path / "run"
    layout = "pipeline=2 microbatches=4 schedule=mine.txt"
    file.write_text(ORDERS[0])
    run(configure(folder, layout, steps=2, schedule="constant"))
    file.write_text(ORDERS[1])
    run(configure(folder, layout, steps=3, schedule="constant"))
    with pytest.raises(LayoutError, match="runs 1 microbatch, and microbatches=4"):
        run(configure(tmp_path / "again", layout, steps=3))
    file.unlink()
    whole = configure(folder, layout, steps=4, schedule="constant")
    summary = run(whole)
    assert (summary["step"], summary["layout"]) == (4, f"data=1 tensor=1 {layout} threads=1")
    assert read_plan(folder / "plan.toml").layout.actions == ORDERS[0]
    named = configure(tmp_path / "named", "pipeline=2 microbatches=4", steps=4, schedule="constant")
    run(named)
    assert losses(whole) == pytest.approx(losses(named), rel=2e-5)


def test_a_run_whose_updates_come_late_goes_on_as_it_was(tmp_path: Path, run: Callable[[TrainingConfig], dict[str, Any]]) -> None:
    """Saving applies what waits, in the run that goes on and in the one that is started again; each step has its row."""
    whole = configure(tmp_path / "whole", "data=2 staleness=2", schedule="constant")
    summary = run(whole)
    assert (summary["step"], len(losses(whole))) == (12, 12)
    assert summary["loss"] == losses(whole)[-1]
    broken = configure(tmp_path / "broken", "data=2 staleness=2", schedule="constant", steps=6)
    run(broken)
    run(configure(tmp_path / "broken", "data=2 staleness=2", schedule="constant"))
    assert losses(broken) == losses(whole)
    assert losses(broken, "eval_loss") == losses(whole, "eval_loss")
    # Saved every three steps, and so of every three the first is on weights of all steps before it, and applies nothing at its end.
    assert len(losses(whole, "grad_norm")) == 4
    mine, theirs = (load_file(Path(c.run.folder) / "model.safetensors") for c in (broken, whole))
    assert all(mine[name].equal(theirs[name]) for name in theirs)


def in_ranks(world: World, folder: str) -> tuple[int, float]:
    """As under torchrun: every rank calls `flow.train` with the world that it is in."""
    summary = flow.train(configure(Path(folder), "data=2", steps=3), planner, world)
    return summary["step"], summary["loss"]


def test_ranks_that_something_else_started_train_too(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(in_ranks, 2, str(tmp_path / "run"))
    assert first == second
    assert first[0] == 3
    assert len(losses(configure(tmp_path / "run", "data=2"))) == 3
    with pytest.raises(Infeasible, match="is for 2 ranks, 1 are here"):
        ranks(in_ranks, 1, str(tmp_path / "other"))


def wait_for_steps(folder: Path, steps: int, launcher: subprocess.Popen[str]) -> None:
    """Until the run's metrics have so many rows."""
    until = time.monotonic() + 90
    path = folder / "metrics.jsonl"
    while not path.exists() or len(read_metrics(path)) < steps:
        assert launcher.poll() is None, launcher.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.01)


def slowly(world: Any, folder: str, peak_flops: float) -> dict[str, Any]:
    """`rank_main` with steps long enough to be interrupted."""
    from shardwise.run.engine import Engine

    real = Engine.step

    def step(self: Engine, *args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return real(self, *args, **options)

    Engine.step = step  # type: ignore[method-assign]
    return flow.rank_main(world, folder, peak_flops)


if __name__ == "__main__":
    real_launch = flow.launch
    flow.launch = lambda function, *args, **options: real_launch(slowly, *args, **options)  # type: ignore[assignment]
    os.environ["OMP_NUM_THREADS"] = "1"
    flow.train(configure(Path(sys.argv[1]), "data=2 zero=1"), planner)
