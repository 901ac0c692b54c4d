"""What a rank of the fault benchmark runs: `shardwise train`'s own loop, which comes to harm at named moments.

In: `orders.json` beside the run folder: what happens to which rank, at which moment, from which step on. Out: a mark beside it when it
happened, and, by rank 0, a record of when which step began and when its row was written. A moment is the call of a function of
shardwise's that
is named here, once; nothing in shardwise knows of it, and a name that is gone ends the benchmark.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import json
import math
import os
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.run.checkpoint import background, disk
from shardwise.run.engine import Engine
from shardwise.run.state.optimizer import Optimizer
from shardwise.run.step.dispatch import StepResult
from shardwise.run.step.stage_runner import StageRunner
from shardwise.train import artifacts, flow, loop
from shardwise.train.checkpoint_saver import CheckpointSaver
from shardwise.train.data.loader import Loader
from shardwise.train.evaluation import Evaluation
from shardwise.train.metrics import MetricsFile
from shardwise.train.training_task import TrainingTask
from shardwise.world.comm.group import Group
from shardwise.world.comm.pending import DONE
from shardwise.world.recorder import CollectiveRecorder
from shardwise.world.world import World

saving = importlib.import_module("shardwise.run.checkpoint.save")  # the package has a function of this name
ORDERS, STEPS = "orders.json", "steps.bin"
BEGAN, TOLD = 0, 1
ENTRY = struct.Struct("<dqq")  # when, which step, began or told
SLOW_S = 0.03
# What a moment is: the calls (class or module, function, whether it is before the call), of which the first that comes counts.
Call = tuple[Any, str, bool]
CALLS: dict[str, tuple[Call, ...]] = {
    "while ranks connect": ((Engine, "_connect_groups", True),),
    "while data is taken": ((Loader, "__next__", True),),
    "in forward": ((StageRunner, "forward", False),),
    "in backward": ((StageRunner, "backward", False),),
    "in a collective": ((Group, "_begin", False),),
    "between gradients and update": ((Engine, "update", True),),
    "in the update": ((Optimizer, "_update", False),),
    "in the evaluation": ((Evaluation, "loss", True),),
    "as a checkpoint begins": ((CheckpointSaver, "save", True),),
    "before a checkpoint's commit": ((saving, "write_part", False), (background, "write_part", False)),
    "after a checkpoint's commit": (
        (saving, "commit_checkpoint", False),
        (background, "commit_checkpoint", False),
        (background.BackgroundSaver, "_complete", False),
    ),
    "at the end": ((artifacts, "write_artifacts", False),),
    "while ranks regroup": ((World, "next_generation", True),),
}
OWN = ("at its start", "before its step", "after its step", "before a snapshot's header", "after a snapshot's header")
MOMENTS = (*OWN, *CALLS)


class Orders:
    """What is to happen in this process. `engine`: the newest; what is due follows from its step."""

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / ORDERS
        self._orders: list[dict[str, Any]] = [o for o in (json.loads(path.read_text()) if path.exists() else []) if rank in o["ranks"]]
        self._folder, self.rank = folder, rank
        self.engine: Engine | None = None
        self.kept = -1  # steps in this process's newest snapshot; -1: none yet
        self._log = os.open(folder / STEPS, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if rank == 0 else -1

    @property
    def step(self) -> int:
        """How many steps the newest engine has made."""
        return self.engine.step_index if self.engine is not None else 0

    @property
    def moments(self) -> set[str]:
        """At which something happens in this process."""
        return {order["where"] for order in self._orders}

    def log(self, step: int, what: int) -> None:
        """Rank 0 writes down when a step began, or was told."""
        if self._log >= 0:
            os.write(self._log, ENTRY.pack(time.monotonic(), step, what))

    def due(self, moment: str) -> list[dict[str, Any]]:
        """What happens now; each once, but for what is `every` time."""
        now = [o for o in self._orders if o["where"] == moment and o["step"] <= self.step <= o["until"] and self._follows(o)]
        return [o for o in now if self._first(o) or o["every"]]

    def at(self, moment: str) -> None:
        """A moment has come."""
        for order in self.due(moment):
            self.harm(order["how"])

    def _follows(self, order: dict[str, Any]) -> bool:
        return not order["after"] or any(self._folder.glob(f"harmed-{order['after']}-*"))

    def _first(self, order: dict[str, Any]) -> bool:
        """Whether it has not happened yet; writes down when it does."""
        mark = self._folder / f"harmed-{order['key']}-{self.rank}"
        if mark.exists():
            return False
        part = mark.with_name(f".{mark.name}")
        part.write_text(f"{time.monotonic()!r} {self.kept}")
        part.rename(mark)
        return True

    def harm(self, how: str) -> None:
        """Does it."""
        what, _, of = how.partition(":")
        match what:
            case "exit":
                os._exit(int(of))
            case "sys.exit":
                raise SystemExit(int(of))
            case "raise":
                raise ValueError("the batch has 7 labels for 8 samples")
            case "memory":
                raise MemoryError("cannot allocate 12 GiB")
            case "sleep":
                time.sleep(3600)
            case "hold":
                ctypes.PyDLL(None).sleep(3600)
            case "slow":
                time.sleep(SLOW_S)
            case "flip":
                self._flip(of)
            case "disk":
                name, _, always = of.partition(":")
                number = getattr(errno, name)
                _fail(disk, "write_file", OSError(number, os.strerror(number)), once=not always)
            case "leave out":
                _call_once(Group, "all_reduce", lambda *_, **__: DONE)
            case "other shape":
                self.engine.world.world_group.all_reduce(torch.zeros(3))  # type: ignore[union-attr]
            case "nan" | "jump":
                pass
            case _:
                os.kill(os.getpid(), getattr(signal, what))

    def _flip(self, what: str) -> None:
        assert self.engine is not None
        if what == "weight":
            x = max((group.data for group in self.engine.rank_model.groups), key=torch.Tensor.numel)
        else:
            x = max(self.engine._optimizer.state_tensors(), key=torch.Tensor.numel)
        x.detach().reshape(-1).view(torch.int32)[5] ^= 1 << 20


def _fail(where: Any, name: str, error: Exception, once: bool) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    if once:
        _call_once(where, name, fails)
    else:
        setattr(where, name, fails)


def _call_once(where: Any, name: str, other: Callable[..., Any]) -> None:
    """The next call of a function is another's."""
    real = getattr(where, name)

    def call(*args: Any, **options: Any) -> Any:
        setattr(where, name, real)
        return other(*args, **options)

    setattr(where, name, call)


def _hook(orders: Orders, moment: str, where: Any, name: str, before: bool) -> None:
    real = getattr(where, name)

    @functools.wraps(real)
    def call(*args: Any, **options: Any) -> Any:
        if before:
            orders.at(moment)
            return real(*args, **options)
        result = real(*args, **options)
        orders.at(moment)
        return result

    setattr(where, name, call)


def _hook_snapshots(orders: Orders) -> None:
    real = CollectiveRecorder.publish_snapshot

    def snapshot(self: CollectiveRecorder, side: int, steps: int | None) -> None:
        if steps is not None:
            orders.at("before a snapshot's header")
        real(self, side, steps)
        if steps is not None:
            orders.kept = steps
            orders.at("after a snapshot's header")

    CollectiveRecorder.publish_snapshot = snapshot  # type: ignore[method-assign]


def _hook_rows(orders: Orders) -> None:
    real = MetricsFile.write

    def write(self: MetricsFile, row: Any) -> None:
        real(self, row)
        orders.log(row["step"] - 1, TOLD)

    MetricsFile.write = write  # type: ignore[method-assign]


def harmed(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """What a rank runs."""
    orders = Orders(Path(folder).parent, world.rank)
    orders.at("at its start")
    for moment in orders.moments & set(CALLS):
        for call in CALLS[moment]:
            _hook(orders, moment, *call)
    _hook_snapshots(orders)
    _hook_rows(orders)

    def make(world: World, job: loop.TrainingJob, subject: TrainingTask) -> Engine:
        orders.engine = None
        engine = loop.make_engine(world, job, subject)
        orders.engine = engine
        steps = engine.step

        def step(batch: Any, **options: Any) -> StepResult:
            orders.log(engine.step_index, BEGAN)
            now = orders.due("before its step")
            for order in now:
                orders.harm(order["how"])
            result = steps(batch, **options)
            orders.at("after its step")
            for order in now:
                if order["how"] in ("nan", "jump"):
                    result = replace(result, total=result.total * (math.nan if order["how"] == "nan" else 50))
            return result

        engine.step = step  # type: ignore[method-assign, assignment]
        return engine

    return loop.train(world, flow.job_of(world, folder, peak_flops), make)
