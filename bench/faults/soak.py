"""`scripts/bench soak`: a training of four ranks that comes to harm every ten seconds, for as long as is asked.

In: seconds. Out: whether the losses of all steps are, bit for bit, those of the run that nothing touched; the part of the time in which
steps were made at the run's own pace; memory and descriptors, early and late; in the terminal and in docs/benchmarks/soak.md. Ranks are
killed, stopped, and end by faults in native code, each drawn at random, at a random moment. Not measured: the loss of the process that
forks ranks, which is a restart (`scripts/bench faults`).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.processes import ROOT
from bench.faults.fault_runs import CONFIG, forkers_of, ranks_of, send
from shardwise.api import plan as make_plan
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.step.dispatch import StepResult
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.train.flow import PlannedRun
from shardwise.train.metrics import read_metrics
from shardwise.train.training_task import TrainingTask
from shardwise.units import format_bytes, format_percent
from shardwise.world.launch.watch import RecoveryPolicy
from shardwise.world.world import World

PAGE = ROOT / "docs" / "benchmarks" / "soak.md"
LAYOUT = "data=2 tensor=2 zero=1"
APART_S = 10.0
STEP_S = 0.1
LOOK_S = 2.0
KINDS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGSTOP")
INTRO = f"""A small GPT trains on four ranks, and every {APART_S:g} s one of them comes to harm. A step lasts {STEP_S:g} s, most of which
is a pause, so that the undisturbed run, which makes none, is soon done. `effective time`: steps times the median time between two of
them, over the time of the run. Memory is what all ranks, the process that forks them and the launcher have for themselves (proportional
set size)."""


@dataclass
class Soaked:
    """What came of it. `descriptors` of the process that forks ranks, `memory` in bytes, both as they were found from time to time."""

    steps: int
    seconds: float
    effective: float
    same: bool
    harmed: Counter[str] = field(default_factory=Counter)
    told: int = 0
    descriptors: list[int] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def early_and_late(self, values: Sequence[int]) -> tuple[float, float]:
        """The medians of the second and of the last quarter."""
        quarter = max(1, len(values) // 4)
        return median(values[quarter : 2 * quarter] or values), median(values[-quarter:])


def paced(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """What a rank runs: a training whose steps last as long as is said."""

    def make(world: World, job: loop.TrainingJob, subject: TrainingTask) -> Engine:
        engine = loop.make_engine(world, job, subject)
        step = engine.step

        def slower(batch: Any, **options: Any) -> StepResult:
            until = time.monotonic() + STEP_S
            result = step(batch, **options)
            time.sleep(max(0.0, until - time.monotonic()))
            return result

        engine.step = slower  # type: ignore[method-assign]
        return engine

    return loop.train(world, flow.job_of(world, folder, peak_flops), make)


class _Harm:
    """What happens beside the run: faults, and a look at what it uses."""

    def __init__(self, folder: Path, found: Soaked) -> None:
        self._rows, self._found, self._draw = folder / "metrics.jsonl", found, random.Random(0)
        self._done = threading.Event()
        self.told: list[float] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._harm, self._look, self._follow)]

    def __enter__(self) -> _Harm:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    def _harm(self) -> None:
        while not self.told and not self._done.wait(0.1):
            pass
        while not self._done.wait(self._draw.uniform(0.5, 1.5) * APART_S):
            if ranks := ranks_of(os.getpid()):
                kind = self._draw.choice(KINDS)
                self._found.harmed[kind] += 1
                send(self._draw.choice(ranks), getattr(signal, kind))

    def _look(self) -> None:
        while not self._done.wait(LOOK_S):
            nests = forkers_of(os.getpid())
            if not nests or not self.told:
                continue
            self._found.descriptors += [len(list(Path(f"/proc/{nest}/fd").iterdir())) for nest in nests]
            self._found.memory.append(sum(map(_own_bytes, [os.getpid(), *nests, *ranks_of(os.getpid())])))

    def _follow(self) -> None:
        """The times at which rows came, by the file's size."""
        size = 0
        while not self._done.wait(0.002):
            now_bytes = self._rows.stat().st_size if self._rows.exists() else 0
            if now_bytes > size:
                size = now_bytes
                self.told.append(time.monotonic())


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration, ValueError):  # it has ended meanwhile
        return 0


def _config(folder: Path, steps: int) -> TrainingConfig:
    text = folder.parent / "text.txt"
    text.write_bytes(b"\n".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md"))))
    lines = [f"data.text={text}", f"run.folder={folder}", f"train.steps={steps}", "train.checkpoint_every=500"]
    return TrainingConfig.parse(CONFIG, changes=[*lines, f"plan.layout={LAYOUT} threads=1"])


def _planner(config: TrainingConfig, known: Plan | None) -> PlannedRun:
    plan = known or make_plan(config.model.name, config.train.batch, cluster="2xcpu-2", layout=config.plan.layout)
    return PlannedRun(replace(plan, batch_size=config.train.batch), 0.0, "cpu")


def _losses(folder: Path) -> list[float]:
    return [float(row["loss"] or 0.0) for row in read_metrics(folder / "metrics.jsonl")]


def soak(seconds: float, parent: Path) -> Soaked:
    """One run with harm, of about so many seconds, and the calm one."""
    steps = max(20, int(seconds / STEP_S))
    found = Soaked(steps, 0.0, 0.0, False)
    calm, folder = parent / "calm", parent / "harmed"
    flow.train(_config(calm, steps), _planner)
    before = flow.launch, flow.rank_main
    with _Harm(folder, found) as harm:

        def heard(text: str) -> None:
            found.told += "takes its place" in text

        def launched(function: Any, *args: Any, recovery: RecoveryPolicy, **options: Any) -> Any:
            return before[0](function, *args, recovery=replace(recovery, report=heard), **options)

        flow.launch, flow.rank_main = launched, paced
        try:
            flow.train(_config(folder, steps), _planner)
        finally:
            flow.launch, flow.rank_main = before
    found.seconds = harm.told[-1] - harm.told[0]
    between = median(b - a for a, b in zip(harm.told, harm.told[1:], strict=False))
    found.effective = min(1.0, between * (steps - 1) / found.seconds)
    found.same = _losses(folder) == _losses(calm)
    return found


def table(found: Soaked) -> Table:
    """A row a figure."""
    out = Table("", "", title="Soak", title_justify="left")
    early, late = found.early_and_late(found.descriptors)
    before, after = map(format_bytes, found.early_and_late(found.memory))
    harmed = ", ".join(f"{kind} {count}" for kind, count in sorted(found.harmed.items()))
    for row in (
        ("steps", f"{found.steps:,}"),
        ("time of the run", f"{found.seconds:,.0f} s"),
        ("faults", f"{sum(found.harmed.values())}: {harmed}"),
        ("replaced ranks that were told", str(found.told)),
        ("losses of all steps equal the undisturbed run's", "yes, bit for bit" if found.same else "no"),
        ("effective time", format_percent(found.effective)),
        ("descriptors, second quarter and last", f"{early:g}, {late:g}"),
        ("memory, second quarter and last", f"{before}, {after}"),
    ):
        out.add_row(*row)
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, soak, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench soak", description="a long training with faults", allow_abbrev=False)
    p.add_argument("--seconds", type=float, default=1800.0)
    p.add_argument("--quick", action="store_true", help="20 seconds; does not write the page")
    given = p.parse_args(list(arguments))
    about = header(command("soak", arguments), versions(("torch",)), load=load(), measured="one run")
    with tempfile.TemporaryDirectory() as folder:
        made = table(soak(20.0 if given.quick else given.seconds, Path(folder)))
    terminal().print(made)
    if not given.quick:
        PAGE.write_text("\n".join([*opening("soak", about, INTRO), *lines_of(made)]))
        terminal().print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
