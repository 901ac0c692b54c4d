"""Faults of one rank's memory and arithmetic, in what no other rank has too: rank and tensor are named, and no bit of the losses differs.

Each fault is put where it would happen: into one parameter's gradient as backward makes it, into a weight or the optimizer's state between
two steps. Broken twins: norms that are taken after the sum name all ranks; a state that nobody watches trains on, wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recovery import lasting, train  # noqa: F401
from test_train import losses, planner

from shardwise.errors import RankError
from shardwise.run.engine import Engine
from shardwise.run.gradients.gradient_reducer import GradientReducer
from shardwise.run.step.dispatch import StepResult
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.train.training_task import TrainingTask
from shardwise.world.world import World

NAME = "layers.1.mlp.up.weight"  # of the last pipeline stage, and cut over tensor ranks
AT = {"nan": 11, "jump": 12, "slot": 13, "weight": 14}  # the step, counted from 0, that each fault is in
LAYOUTS = ["data=2", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2"]


def harmed(world: World, folder: str, peak_flops: float, kinds: tuple[str, ...], once: bool) -> dict[str, Any]:
    """What a rank runs; on rank 1 something is wrong in each of `kinds`."""
    done: set[str] = set()

    def make(world: World, job: loop.TrainingJob, subject: TrainingTask) -> Engine:
        engine = loop.make_engine(world, job, subject)
        if world.rank != 1:
            return engine
        factor = [1.0]
        engine.rank_model.parameters[NAME].register_hook(lambda grad: grad * factor[0])
        steps = engine.step

        def step(batch: Any, **options: Any) -> StepResult:
            now = [kind for kind in kinds if AT[kind] == engine.step_index and not (once and kind in done)]
            done.update(now)
            factor[0] = math.nan if "nan" in now else 1e12 if "jump" in now else 1.0
            for x in [engine.rank_model.groups[0].data] * ("weight" in now) + [engine._optimizer.slots(0)[0]["exp_avg"]] * ("slot" in now):
                x.view(torch.int32)[x.abs().argmax()] ^= 1 << 26
            return steps(batch, **options)

        engine.step = step  # type: ignore[method-assign]
        return engine

    return loop.train(world, flow._read_job(Path(folder), peak_flops), make)


def once(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return harmed(world, folder, peak_flops, ("nan", "jump", "slot", "weight"), once=True)


def always(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return harmed(world, folder, peak_flops, ("nan",), once=False)


def after_the_sum(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    GradientReducer.norms = property(lambda self: [group.grad.norm() for group in self.groups])  # type: ignore[assignment, method-assign]
    return harmed(world, folder, peak_flops, ("jump",), once=True)


def slot_flips(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    return harmed(world, folder, peak_flops, ("slot",), once=True)


def short(folder: Path, layout: str, **run: Any) -> TrainingConfig:
    config = lasting(folder, layout, **run)
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": 16, "evaluate_every": 0})})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_and_tensor_are_named_and_no_bit_differs(
    tmp_path: Path,
    train: Callable[[TrainingConfig], list[float]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    layout: str,
) -> None:
    calm = train(short(tmp_path / "calm", layout, protect="none"))
    capfd.readouterr()
    monkeypatch.setattr(flow, "rank_main", once)
    assert train(short(tmp_path / "harmed", layout)) == calm
    said = capfd.readouterr().err
    assert "step 12: the norm of the gradients of rank 1 is nan; it is rerun" in said
    assert "step 13: the norm of the gradients of rank 1 went up to" in said
    for step in (12, 13):
        assert f"step {step}: correct when rerun; wrong before was the gradient of {NAME} on rank 1\n" in said
    assert "step 14: a bit was flipped in exp_avg of " in said
    assert "step 15: a bit was flipped in " in said
    assert said.count("on rank 1; it is rerun from the snapshot before it") == 2
    if layout in ("tensor=2", "data=2 zero=3"):
        return
    monkeypatch.setattr(flow, "rank_main", always)
    with pytest.raises(RankError) as caught:
        train(short(tmp_path / "always", layout))
    if layout != "data=2":  # where replicas would find it
        monkeypatch.setattr(flow, "rank_main", slot_flips)
        unwatched = short(tmp_path / "unwatched", layout, protect="none")
        assert flow.train(unwatched, planner)["step"] == 16
        assert losses(unwatched) != calm[:16]
    words = f"the norm of the gradients of rank 1 is nan at step 12, run twice: it comes from the gradient of {NAME} on rank 1; "
    assert words in str(caught.value)


def test_norms_after_the_sum_would_name_all_ranks(
    tmp_path: Path,
    train: Callable[[TrainingConfig], list[float]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(flow, "rank_main", after_the_sum)
    train(short(tmp_path / "run", "data=2"))
    assert f"the gradient of {NAME} on rank 0, 1\n" in capfd.readouterr().err
