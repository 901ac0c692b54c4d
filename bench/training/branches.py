"""`scripts/bench branches`: ranks that own parallel branches, beside data parallelism on the same ranks.

A network of four towers beside one another (a quarter of a transformer's heads and of its feed-forward layers each, as in SUPER's
evaluation), and one that adds its four branches up in every layer. Engines of the layouts take turns in the same processes. Out: medians of
rounds, in the terminal and in `--json FILE`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.table import Table
from torch import nn

from bench.common.document import command, header, load, terminal, versions
from bench.common.measure import in_turns
from shardwise.api import plan as make_plan
from shardwise.run.engine import Engine
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.towers import FourBranches

LAYOUTS = {2: ("data=2", "branch=2"), 4: ("data=4", "branch=4", "data=2 branch=2")}
VOCABULARY, SEQUENCE = 512, 16


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds a step by round, of one layout; `ratio`: by round, that of data parallelism over it."""

    case: str
    ranks: int
    layout: str
    step_ms: list[float]
    ratio: list[float]


def measure(name: str, every_layer: bool, ranks: int, samples: int, rounds: int, steps: int) -> list[Row]:
    """Rounds of steps of every layout on so many ranks, with so many samples on each."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(VOCABULARY, (ranks * samples, SEQUENCE), generator=generator) for _ in range(2))
    batch = {"ids": ids, "labels": labels}

    def make() -> nn.Module:
        return FourBranches(4, 256, 8, 1024, VOCABULARY, every_layer)

    plans = {layout: make_plan(make, batch, cluster="1xcpu-2", layout=f"{layout} threads=1") for layout in LAYOUTS[ranks]}

    def on_rank(world: World) -> list[dict[str, float]]:
        engines = {layout: Engine(plan, make, batch, None, world, seed=0) for layout, plan in plans.items()}
        return in_turns(
            {layout: partial(engine.step, batch) for layout, engine in engines.items()}, rounds, steps, world.world_group.barrier
        )

    each = launch(on_rank, ranks, timeout_s=600, show=False)[0]
    first = LAYOUTS[ranks][0]
    return [
        Row(name, ranks, layout, [1e3 * took[layout] for took in each], [took[first] / took[layout] for took in each])
        for layout in LAYOUTS[ranks]
    ]


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench branches", description="ranks that own branches beside data parallelism")
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and every round to FILE")
    p.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=sorted(LAYOUTS))
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=10, help="of each layout in a round")
    p.add_argument("--samples", type=int, default=1, help="of each rank")
    p.add_argument("--quick", action="store_true", help="two ranks, three rounds of three steps")
    given = p.parse_args(list(arguments))
    rounds, steps = (3, 3) if given.quick else (given.rounds, given.steps)
    about = header(
        command("branches", arguments),
        versions(("torch",)),
        load=load(),
        measured=f"{rounds} rounds of {steps} steps of each layout, interleaved; {given.samples} samples of {SEQUENCE} positions a rank",
    )
    rows: list[Row] = []
    for ranks in [2] if given.quick else given.ranks:
        for name, every_layer in (("four towers", False), ("four branches in every layer", True)):
            rows += measure(name, every_layer, ranks, given.samples, rounds, steps)
    table = Table(title="Ranks that own branches", title_justify="left")
    for head in ("case", "ranks", "layout", "ms a step", "ratio to data (least to most)"):
        table.add_column(head)
    for row in rows:
        ratio = f"{median(row.ratio):.2f} ({min(row.ratio):.2f} to {max(row.ratio):.2f})"
        table.add_row(row.case, str(row.ranks), row.layout, f"{median(row.step_ms):.1f}", ratio)
    console = terminal()
    console.print(table)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "found": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0
