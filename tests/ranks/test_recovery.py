"""Runs whose ranks are killed, stopped or hang: they end with the losses of the run that nothing touched, bit for bit, and leave nobody.

A second thread does the harm, at moments drawn from a seed; what it harms it finds as the launcher's descendants.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import children_of
from test_train import configure, losses, planner

from weft.train import flow
from weft.train.config import Config
from weft.world.launch import Launcher

STEPS = 40


@pytest.fixture
def train(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Callable[[Config], list[float]]:
    """Trains in the session's prepared process; returns the losses."""
    monkeypatch.setattr(flow, "launch", lambda *args, preload, **options: launcher.launch(*args, **options))

    def run(config: Config) -> list[float]:
        summary = flow.train(config, planner)
        assert summary["step"] == config.train.steps
        return [*losses(config), *losses(config, "eval_loss")]

    return run


def lasting(folder: Path, layout: str, **run: Any) -> Config:
    config = configure(folder, layout, steps=STEPS, checkpoint_every=15, evaluate_every=20)
    return config.model_copy(update={"run": config.run.model_copy(update=run)})


def ranks_of(launcher: Launcher) -> list[int]:
    """The processes of the ranks, which the prepared process's child forked."""
    return sorted(pid for nest in children_of(launcher.pid or 0) for pid in children_of(nest))


def rows(config: Config) -> int:
    path = Path(config.run.folder) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Harm:
    """Does something to a rank, drawn at random, each time that so many steps have been told."""

    def __init__(self, launcher: Launcher, config: Config, at: tuple[int, ...], number: signal.Signals, seed: int = 0) -> None:
        self.done = 0
        self._thread = threading.Thread(target=self._work, args=(launcher, config, at, number, random.Random(seed)), daemon=True)

    def __enter__(self) -> Harm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _work(self, launcher: Launcher, config: Config, at: tuple[int, ...], number: signal.Signals, draw: random.Random) -> None:
        for step in at:
            until = time.monotonic() + 60
            while (rows(config) < step or not ranks_of(launcher)) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.02))
            if ranks := ranks_of(launcher):
                os.kill(draw.choice(ranks), number)
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
def test_killed_ranks_cost_no_bit(tmp_path: Path, train: Callable[[Config], list[float]], launcher: Launcher, layout: str) -> None:
    calm = train(lasting(tmp_path / "calm", layout, protect="none"))
    harmed = lasting(tmp_path / "harmed", layout)
    with Harm(launcher, harmed, (3, 9, 15, 20), signal.SIGKILL, seed=len(layout)) as harm:
        assert train(harmed) == calm
    assert harm.done == 4
