"""`scripts/bench staleness`: what late updates save where ranks are late by chance.

In every step every rank sleeps a random while, exponentially distributed with one mean for all; the same whiles for every K. Engines with
staleness=0, 1 and 3 take turns in the same processes. Out: seconds a step, in the terminal, in `--json FILE` and in
docs/benchmarks/staleness.md, beside what the rank took in a round that slept most, which no K can beat. Not measured: how well a
model learns from stale gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from bench.document import command, header, versions
from bench.measure import turn
from bench.pipeline import lines_of
from bench.processes import ROOT
from weft.api import plan as make_plan
from weft.run.engine import Engine
from weft.world.launch import launch
from weft.world.world import World

PAGE = ROOT / "docs" / "benchmarks" / "staleness.md"
STALENESS = (0, 1, 3)
HIDDEN, SAMPLES = 256, 8

INTRO = """Seconds a step, medians of rounds. In every step every rank sleeps a while drawn from an exponential distribution, the same for
every K; synchronous ranks wait for the one that sleeps longest. `most asleep`: the rank that slept most in a round, with no compute and
no waiting: less is not possible. `ratio` is that of the median step with staleness=0 to that with K, by round, then the median."""


class Small(nn.Module):
    """Next to no compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds a step by K, in every round; `asleep`: of the rank that slept most."""

    ranks: int
    all_reduce: str
    asleep_ms: list[float]
    step_ms: dict[int, list[float]]

    def ratio(self, staleness: int) -> float:
        """How many times as fast a step is as with staleness=0."""
        return median(a / b for a, b in zip(self.step_ms[0], self.step_ms[staleness], strict=True))


def sleeps(ranks: int, round_number: int, steps: int, mean_s: float) -> list[list[float]]:
    """Seconds by rank and step.

    >>> a, b = sleeps(2, 0, 3, 1.0), sleeps(2, 0, 3, 1.0)
    >>> a == b, [len(row) for row in a]
    (True, [3, 3])
    """
    drawn = random.Random(round_number)
    return [[drawn.expovariate(1 / mean_s) for _ in range(steps)] for _ in range(ranks)]


def measure(ranks: int, all_reduce: str, rounds: int, steps: int, mean_s: float) -> Found:
    """Rounds of steps on so many ranks."""
    batch = (torch.randn(ranks * SAMPLES, HIDDEN),)
    words = [f"data={ranks} threads=1 staleness={k} all_reduce={all_reduce}" for k in STALENESS]
    plans = [make_plan(Small, batch, cluster="1xcpu-2", layout=layout) for layout in words]

    def on_rank(world: World) -> list[list[float]]:
        engines = {str(k): Engine(plan, Small, batch, None, world, seed=0) for k, plan in zip(STALENESS, plans, strict=True)}
        found: list[list[float]] = []
        for number in range(-1, rounds):  # the first does not count
            mine = sleeps(ranks, number, steps, mean_s)[world.rank]
            took = {name: _timed(engines[name], world, batch, mine) for name in turn(list(engines), max(0, number))}
            found.append([took[name] for name in engines])
        return found[1:]

    each = launch(on_rank, ranks, timeout_s=600, show=False)[0]
    asleep = [max(map(sum, sleeps(ranks, number, steps, mean_s))) / steps * 1e3 for number in range(rounds)]
    return Found(ranks, all_reduce, asleep, {k: [row[i] / steps * 1e3 for row in each] for i, k in enumerate(STALENESS)})


def _timed(engine: Engine, world: World, batch: Any, mine: Sequence[float]) -> float:
    """Seconds of all steps, the last update included, until every rank is there."""
    world.everyone.barrier()
    began = time.perf_counter()
    for seconds in mine:
        time.sleep(seconds)
        engine.step(batch)
    engine.drain()
    world.everyone.barrier()
    return time.perf_counter() - began


def table(found: Sequence[Found]) -> Table:
    """One row for each number of ranks and algorithm."""
    out = Table(title="A step while ranks sleep at random", title_justify="left")
    for name in ("ranks", "all_reduce", "most asleep, ms", *(f"K={k}, ms" for k in STALENESS), *(f"ratio K={k}" for k in STALENESS[1:])):
        out.add_column(name, justify="left" if name == "all_reduce" else "right")
    for f in found:
        steps = [f"{median(f.step_ms[k]):.1f}" for k in STALENESS]
        out.add_row(str(f.ranks), f.all_reduce, f"{median(f.asleep_ms):.1f}", *steps, *(f"{f.ratio(k):.2f}" for k in STALENESS[1:]))
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench staleness", description="late updates where ranks are late", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and every round to FILE")
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--steps", type=int, default=30, help="of each K in a round")
    p.add_argument("--sleep-ms", type=float, default=10.0, help="mean of what a rank sleeps in a step")
    p.add_argument("--quick", action="store_true", help="two ranks, three rounds of ten steps; does not write the page")
    given = p.parse_args(list(arguments))
    rounds, steps = (3, 10) if given.quick else (given.rounds, given.steps)
    about = header(
        command("staleness", arguments),
        versions(("torch",)),
        load=f"{os.getloadavg()[0]:.1f} processes were running before (a quiet machine has 0)",
        measured=f"{rounds} rounds of {steps} steps of each K, interleaved; ranks sleep {given.sleep_ms:g} ms in the mean",
    )
    console = Console(soft_wrap=True) if not sys.stdout.isatty() else Console()
    found = []
    for ranks in [2] if given.quick else given.ranks:
        for all_reduce in ("parameter_server", "native"):
            console.print(f"{ranks} ranks, all_reduce={all_reduce}")
            found.append(measure(ranks, all_reduce, rounds, steps, given.sleep_ms / 1e3))
    made = table(found)
    console.print(made)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "found": [asdict(f) for f in found]}, indent=1) + "\n")
    if not given.quick:
        head = [f"| {key} | {value} |" for key, value in about.items()]
        lines = ["# Benchmark: late updates", "", "Written by the run itself.", "", "|  |  |", "| --- | --- |", *head, "", INTRO, ""]
        PAGE.write_text("\n".join([*lines, *lines_of(made)]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
