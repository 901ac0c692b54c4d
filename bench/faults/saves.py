"""`scripts/bench saves`: how long training waits for a checkpoint, and how long steps last while one is written.

Two ranks train; in every round they make quiet steps, save and wait for it, make quiet steps, save beside training and make steps until the
checkpoint is there. Out: seconds, in the terminal, in `--json FILE` and in docs/benchmarks/saves.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

from rich.table import Table

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.processes import ROOT
from shardwise.api import plan as make_plan
from shardwise.run import checkpoint
from shardwise.run.engine import Engine
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

PAGE = ROOT / "docs" / "benchmarks" / "saves.md"
INTRO = """What a checkpoint costs training, two ranks, medians over rounds (and the least to the most). `waited for`: training stands still
until the files are on the disk. `beside`: it stands still for the copy of the state alone; then steps go on while a thread of each rank
writes, `writing` long, and `slower` is by how much those steps together are longer than as many quiet ones of that round."""


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds in every round; `size_bytes` of a checkpoint."""

    layout: str
    size_bytes: int
    waited_s: list[float]
    copy_s: list[float]
    writing_s: list[float]
    quiet_s: list[float]  # a step
    during_s: list[float]  # a step while files are written
    slower_s: list[float]


def measure(model: str, layout: str, batch: int, rounds: int, steps: int) -> Found:
    """Rounds under one layout."""
    subject = resolve(model)
    data = subject.batch(batch)
    plan = make_plan(subject.make, data, loss=subject.loss, cluster="1xcpu-2", layout=f"{layout} threads=1")

    def on_rank(world: World) -> tuple[int, list[list[float]]]:
        engine = Engine(plan, subject.make, data, subject.loss, world, seed=0)

        def step() -> float:
            began = time.perf_counter()
            engine.step(data)
            return time.perf_counter() - began

        with tempfile.TemporaryDirectory() as name:
            folder = Path(world.broadcast_text(lambda: name))
            beside = checkpoint.BackgroundSaver(folder / "beside", world, keep=1)
            found: list[list[float]] = []
            size = 0
            for number in range(-1, rounds):  # the first does not count: a model is compiled, memory is touched
                quiet = [step() for _ in range(steps)]
                world.world_group.barrier()
                began = time.perf_counter()
                path = checkpoint.save(folder / "waited", 2 * number + 2, engine.state_shards(), {}, world, keep=1)
                waited_s = time.perf_counter() - began
                size = checkpoint.size_of(path)
                quiet += [step() for _ in range(steps)]
                world.world_group.barrier()
                began = time.perf_counter()
                beside.begin(2 * number + 3, engine.state_shards())
                copy_s = time.perf_counter() - began
                during: list[float] = []
                written = None
                while written is None:
                    during.append(step())
                    failed, goes_on = world.all_reduce_max(beside.vote())
                    written = beside.apply_vote(failed, goes_on)
                slower_s = sum(during) - len(during) * median(quiet)
                if number >= 0:
                    found.append([waited_s, copy_s, written.seconds, median(quiet), median(during), slower_s])
            world.world_group.barrier()
        return size, found

    size, found = launch(on_rank, plan.layout.num_ranks, threads=1, timeout_s=900, show=False)[0]
    return Found(str(layout), size, *map(list, zip(*found, strict=True)))


def table(all_found: Sequence[Found]) -> Table:
    """For people."""
    out = Table(title="Checkpoints", title_justify="left")
    names = [field.name for field in fields(Found) if field.name.endswith("_s")]
    heads = ("waited for, ms", "beside: the copy, ms", "writing, ms", "a quiet step, ms", "a step beside it, ms", "slower in all, ms")
    for head in ("layout", "MB", *heads):
        out.add_column(head, justify="left" if head == "layout" else "right")
    for found in all_found:
        cells = []
        for name in names:
            values = [1000 * s for s in getattr(found, name)]
            cells.append(f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})")
        out.add_row(found.layout, f"{found.size_bytes / 1e6:.0f}", *cells)
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench saves", description="what a checkpoint costs training", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and figures to FILE")
    p.add_argument("--model", default="gpt-10m")
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=4, help="quiet ones before each save")
    p.add_argument("--layouts", nargs="+", default=["data=2", "data=2 zero=1"])
    p.add_argument("--quick", action="store_true", help="a tiny model, one round; does not write the page")
    given = p.parse_args(list(arguments))
    model, rounds, steps = ("gpt-tiny", 1, 2) if given.quick else (given.model, given.rounds, given.steps)
    about = header(
        command("saves", arguments), versions(("torch",)), load=load(),
        measured=f"{model}, batch {given.batch}, two ranks of one thread, {rounds} rounds of {2 * steps} quiet steps",
    )  # fmt: skip
    found = [measure(model, layout, given.batch, rounds, steps) for layout in given.layouts]
    console = terminal()
    console.print(table(found))
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": [asdict(one) for one in found]}, indent=1) + "\n")
    if not given.quick:
        PAGE.write_text("\n".join([*opening("saving", about, INTRO), *lines_of(table(found))]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
