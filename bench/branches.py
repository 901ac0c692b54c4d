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
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from bench.document import command, header, load, terminal, versions
from bench.measure import in_turns
from weft.api import plan as make_plan
from weft.run.engine import Engine
from weft.world.launch import launch
from weft.world.world import World

LAYOUTS = {2: ("data=2", "branch=2"), 4: ("data=4", "branch=4", "data=2 branch=2")}
VOCABULARY, SEQUENCE = 512, 16


class Quarter(nn.Module):
    """A part of a transformer's layer: so many of its heads, so wide a part of its feed-forward layer."""

    def __init__(self, width: int, heads: int, dim: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * heads * dim, bias=False), nn.Linear(heads * dim, width, bias=False)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.relu(self.up(self.between(x))))


class FourBranches(nn.Module):
    """`every_layer`: branches are added up in each, else once, behind all layers. Embeddings are tied."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, vocabulary: int, every_layer: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.every_layer = nn.Embedding(vocabulary, width), nn.LayerNorm(width), every_layer
        quarters = [[Quarter(width, heads // 4, width // heads, inner // 4) for _ in range(4)] for _ in range(layers)]
        self.layers = nn.ModuleList(nn.ModuleList(row) for row in quarters)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.every_layer:
            for layer in self.layers:
                x = x + sum(branch(x) for branch in layer)
        else:
            towers = [x] * 4
            for layer in self.layers:
                towers = [branch(tower) for branch, tower in zip(layer, towers, strict=True)]
            x = towers[0] + towers[1] + towers[2] + towers[3]
        return F.cross_entropy(F.linear(self.norm(x), self.embed.weight).flatten(0, 1), labels.flatten())


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
        return in_turns({layout: partial(engine.step, batch) for layout, engine in engines.items()}, rounds, steps, world.everyone.barrier)

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
