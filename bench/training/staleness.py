"""`scripts/bench staleness`: what late updates save where ranks are late by chance.

In every step every rank sleeps a random while, exponentially distributed with one mean for all; the same whiles for every K. Engines with
staleness=0, 1 and 3 take turns in the same processes. Out: seconds a step, in the terminal, in `--json FILE` and in
docs/benchmarks/staleness.md, beside what the rank took in a round that slept most, which no K can beat; and a GPT's loss on text, by steps
and by time.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.measure import turn
from bench.common.processes import ROOT
from shardwise.api import plan as make_plan
from shardwise.run.engine import Engine
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

PAGE = ROOT / "docs" / "benchmarks" / "staleness.md"
STALENESS = (0, 1, 3)
MODEL = "gpt-tiny:vocabulary=256,sequence=32"
SEQUENCE, SAMPLES = 32, 4  # of a rank
LAST = 10  # steps whose mean loss is told

INTRO = """Seconds a step, medians of rounds. In every step every rank sleeps a while drawn from an exponential distribution, the same for
every K; synchronous ranks wait for the one that sleeps longest. `most asleep`: the rank that slept most in a round, with no compute and
no waiting: less is not possible. `ratio` is that of a step with staleness=0 to that with K, by round: the median, and the least and the
most. A GPT learns text by byte (shardwise's own pages), every K from the same weights over the same batches: `last loss` is the mean of its
last 10 steps, and `s to it` how long a K takes, by steps times its median step, until the mean of 10 is the highest of these."""


def text_batches(count: int, samples: int, sequence: int) -> list[dict[str, Tensor]]:
    """Batches of text by byte: windows of shardwise's own pages, drawn with a seed; labels are the next bytes."""
    pages = b"\n".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md")))
    text = torch.frombuffer(bytearray(pages), dtype=torch.uint8).long()
    drawn = random.Random(0)
    found = []
    for _ in range(count):
        at = [drawn.randrange(len(text) - sequence - 1) for _ in range(samples)]
        found.append({"input_ids": torch.stack([text[i : i + sequence] for i in at]),
                      "labels": torch.stack([text[i + 1 : i + sequence + 1] for i in at])})  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """Milliseconds a step by K, in every round; `asleep`: of the rank that slept most."""

    ranks: int
    all_reduce: str
    asleep_ms: list[float]
    step_ms: dict[int, list[float]]
    losses: dict[int, list[float]]  # of every step, from the same weights over the same text

    def last_loss(self, staleness: int) -> float:
        """The mean loss of the last steps."""
        return mean(self.losses[staleness][-LAST:])

    def steps_to(self, staleness: int) -> float:
        """Steps to a loss that all reach, the dearest of the K's last: the first at which the mean over some steps is as low."""
        goal = max(self.last_loss(k) for k in self.losses)
        curve = self.losses[staleness]
        return next(i + LAST for i in range(len(curve) - LAST + 1) if mean(curve[i : i + LAST]) <= goal)

    def ratio(self, staleness: int) -> float:
        """How many times as fast a step is as with staleness=0."""
        return median(self.ratios(staleness))

    def ratios(self, staleness: int) -> list[float]:
        """The same by round."""
        return [a / b for a, b in zip(self.step_ms[0], self.step_ms[staleness], strict=True)]


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
    batches = text_batches((rounds + 1) * steps, ranks * SAMPLES, SEQUENCE)
    model = resolve(MODEL, ranks * SAMPLES)
    words = [f"data={ranks} threads=1 staleness={k} all_reduce={all_reduce}" for k in STALENESS]
    plans = [make_plan(model, batches[0], cluster="1xcpu-2", layout=layout) for layout in words]

    def on_rank(world: World) -> tuple[list[list[float]], dict[str, list[float]]]:
        made = zip(STALENESS, plans, strict=True)
        engines = {str(k): Engine(plan, model.make, batches[0], model.loss, world, seed=0) for k, plan in made}
        found: list[list[float]] = []
        losses: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(-1, rounds):  # the first does not count
            mine = sleeps(ranks, number, steps, mean_s)[world.rank]
            text = batches[(number + 1) * steps : (number + 2) * steps]
            took = {name: _timed(engines[name], world, text, mine, losses[name]) for name in turn(list(engines), max(0, number))}
            found.append([took[name] for name in engines])
            if world.rank == 0:
                each = ", ".join(f"K={k} {s / steps * 1e3:.0f} ms" for k, s in took.items())
                print(f"  round {number + 1} of {rounds}: {each}", flush=True)
        return found[1:], losses

    each, curves = launch(on_rank, ranks, timeout_s=600, show=False)[0]
    asleep = [max(map(sum, sleeps(ranks, number, steps, mean_s))) / steps * 1e3 for number in range(rounds)]
    return Found(ranks, all_reduce, asleep, {k: [row[i] / steps * 1e3 for row in each] for i, k in enumerate(STALENESS)},
                 {int(k): list(curve) for k, curve in curves.items()})  # fmt: skip


def _timed(engine: Engine, world: World, text: Sequence[Any], mine: Sequence[float], losses: list[float]) -> float:
    """Seconds of all steps, the last update included, until every rank is there. `losses`: to which each step's is added."""
    world.world_group.barrier()
    began = time.perf_counter()
    results = []
    for seconds, batch in zip(mine, text, strict=True):
        time.sleep(seconds)
        results.append(engine.step(batch))
    engine.drain()
    world.world_group.barrier()
    took = time.perf_counter() - began
    losses += [float(one.loss) for one in results]
    return took


def tables(found: Sequence[Found]) -> list[Table]:
    """Time and what was learned, one row for each number of ranks and algorithm."""
    heads = ("most asleep, ms", *(f"K={k}, ms" for k in STALENESS), *(f"ratio K={k}" for k in STALENESS[1:]))
    time_, learned = (
        _empty("A step while ranks sleep at random", heads),
        _empty("What a GPT learned meanwhile", (*(f"last loss K={k}" for k in STALENESS), *(f"s to it K={k}" for k in STALENESS))),
    )
    for f in found:
        steps = [f"{median(f.step_ms[k]):.1f}" for k in STALENESS]
        ratios = [f"{f.ratio(k):.2f} ({min(f.ratios(k)):.2f} to {max(f.ratios(k)):.2f})" for k in STALENESS[1:]]
        time_.add_row(str(f.ranks), f.all_reduce, f"{median(f.asleep_ms):.1f}", *steps, *ratios)
        reached = [f"{f.steps_to(k) * median(f.step_ms[k]) / 1e3:.1f}" for k in STALENESS]
        learned.add_row(str(f.ranks), f.all_reduce, *(f"{f.last_loss(k):.3f}" for k in STALENESS), *reached)
    return [time_, learned]


def _empty(title: str, heads: Sequence[str]) -> Table:
    out = Table(title=title, title_justify="left")
    for name in ("ranks", "all_reduce", *heads):
        out.add_column(name, justify="left" if name == "all_reduce" else "right")
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench staleness", description="late updates where ranks are late", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and every round to FILE")
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=30, help="of each K in a round")
    p.add_argument("--sleep-ms", type=float, default=30.0, help="mean of what a rank sleeps in a step")
    p.add_argument("--quick", action="store_true", help="two ranks, three rounds of ten steps; does not write the page")
    given = p.parse_args(list(arguments))
    rounds, steps = (3, 10) if given.quick else (given.rounds, given.steps)
    about = header(
        command("staleness", arguments),
        versions(("torch",)),
        load=load(),
        measured=f"{rounds} rounds of {steps} steps of each K, interleaved; ranks sleep {given.sleep_ms:g} ms in the mean",
    )
    console = terminal()
    found = []
    for ranks in [2] if given.quick else given.ranks:
        for all_reduce in ("parameter_server", "native"):
            console.print(f"{ranks} ranks, all_reduce={all_reduce}")
            found.append(measure(ranks, all_reduce, rounds, steps, given.sleep_ms / 1e3))
    made = tables(found)
    console.print(*made, sep="\n")
    if given.json:
        given.json.write_text(json.dumps({"about": about, "found": [asdict(f) for f in found]}, indent=1) + "\n")
    if not given.quick:
        PAGE.write_text("\n".join([*opening("late updates", about, INTRO), *(line for one in made for line in lines_of(one))]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
