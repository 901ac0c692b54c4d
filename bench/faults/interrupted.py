"""`scripts/bench interrupted`: a step of many microbatches in which a rank is killed: seconds to its end, gone on with and made again.

In: a layout and a batch. Out, of three runs (nobody is killed; the step is made again whole; it is gone on with): seconds of a step, and
from the kill to the end of the step, the microbatches that ran after it, and whether the losses are the same bit for bit. Rank 1 kills
itself behind the backward of a microbatch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common.document import command, header, load, terminal, versions
from shardwise.api import plan as make_plan
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.step.stage_runner import SavedActivations, StageRunner
from shardwise.train import flow, loop
from shardwise.train.config import TrainingConfig
from shardwise.train.flow import PlannedRun
from shardwise.train.metrics import read_metrics
from shardwise.train.training_task import TrainingTask
from shardwise.world.world import World

STEADY = ("train.steps=4", "train.checkpoint_every=0", "run.sample=0")
STEPS, STEP = 4, 2  # of a run; in which rank 1 dies
RUNS = ("undisturbed", "made again", "gone on with")
TIMES, RUN = "times", "how"  # files beside the run folder
Moment = tuple[float, int, int, int, int]  # when, generation, step, microbatch (-1: the step is made), rank


def harmed(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """What a rank runs; when each backward and each step ended it writes down."""
    run, last = json.loads((Path(folder).parent / RUN).read_text())
    backward, generation = StageRunner.backward, [world.generation]
    log = (Path(folder).parent / TIMES).open("a", buffering=1)

    def timed(runner: StageRunner, saved: SavedActivations, *args: Any) -> Any:
        out = backward(runner, saved, *args)
        step, m = runner.draw.step, runner.draw.microbatch
        log.write(f"{time.monotonic()} {generation[0]} {step} {m} {world.rank}\n")
        if run != RUNS[0] and (generation[0], step, m, world.rank) == (0, STEP, last, 1):
            time.sleep(0.2)  # in which the other rank is as far
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    def make(world: World, job: loop.TrainingJob, subject: TrainingTask) -> Engine:
        engine = loop.make_engine(world, job, subject)
        generation[0], step = world.generation, engine.step
        if run != RUNS[2]:
            engine.resumption.min_step_time_s = math.inf

        def told(*args: Any, **options: Any) -> Any:
            result = step(*args, **options)
            log.write(f"{time.monotonic()} {generation[0]} {engine.step_index - 1} -1 {world.rank}\n")
            return result

        engine.step = told  # type: ignore[method-assign]
        return engine

    StageRunner.backward = timed  # type: ignore[method-assign]
    return loop.train(world, flow._read_job(Path(folder), peak_flops), make)


def _planner(config: TrainingConfig, known: Plan | None) -> PlannedRun:
    plan = known or make_plan(config.model.name, config.train.batch, cluster="2xcpu-2", layout=config.plan.layout)
    return PlannedRun(replace(plan, batch_size=config.train.batch), 0.0, "cpu")


def measure(run: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    text = folder / "text.txt"
    folder.mkdir(parents=True)
    text.write_text("The measured step is the one that was interrupted. " * 4000)
    sizes = [f"batch={options.batch}", f"data.sequence={options.sequence}", f"data.text={text}", f"run.folder={folder / 'run'}"]
    layout = f"plan.layout={options.layout} microbatches={options.microbatches} threads=1"
    config = TrainingConfig.parse(f'[model]\nname = "{options.model}"', changes=[layout, *sizes, *STEADY])
    before, flow.rank_main = flow.rank_main, harmed
    (folder / RUN).write_text(json.dumps([run, options.killed - 1]))
    try:
        flow.train(config, _planner)
    finally:
        flow.rank_main = before
    moments: list[Moment] = [
        (float(when), *map(int, rest)) for when, *rest in (line.split() for line in (folder / TIMES).read_text().splitlines())
    ]  # type: ignore[misc]
    ends = {step: max(when for when, _, of, m, _ in moments if m < 0 and of == step) for step in range(STEPS)}
    dies = max(when for when, g, of, m, rank in moments if (g, of, m, rank) == (0, STEP, options.killed - 1, 1))
    return {
        "run": run,
        "step_s": ends[1] - ends[0],
        "to_the_end_s": ends[STEP] - dies,
        "after": sorted({m for when, g, of, m, _ in moments if of == STEP and m >= 0 and (g or when > dies)}),
        "losses": [row["loss"] for row in read_metrics(folder / "run" / "metrics.jsonl")],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and tell."""
    parser = argparse.ArgumentParser(prog="scripts/bench interrupted", description=__doc__)
    parser.add_argument("--model", default="gpt-10m")
    parser.add_argument("--layout", default="data=2")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--killed", type=int, default=12, help="after so many microbatches of the step")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    head = header(command("interrupted", list(arguments or ())), versions(["torch"]), load=load())
    console = terminal()
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(run, Path(folder) / run.replace(" ", "-"), options) for run in RUNS]
    out = Table("run", "a step", "from the kill to its end", "microbatches run after it", "losses")
    for row in found:
        same = "the same bit for bit" if row["losses"] == found[0]["losses"] else "OTHERS"
        out.add_row(row["run"], f"{row['step_s']:.2f} s", f"{row['to_the_end_s']:.2f} s", str(len(row["after"])), same)
    console.print(out)
    if options.json:
        options.json.write_text(json.dumps({"header": head, "measured": found}, indent=1))
    return int(any(row["losses"] != found[0]["losses"] for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
