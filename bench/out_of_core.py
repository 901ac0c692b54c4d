"""`scripts/bench out_of_core`: what can be trained under one limit of memory a rank, and how fast: pipelines, GEMS, recomputation, offload.

Out: rows and tables in the terminal, `--json FILE`, and docs/benchmarks/out_of_core.md: the largest image and the largest batch of each
way, images a second at one size beside weft's own choice, and the published shape of GEMS (speed-up over MP-Basic by number of batches),
simulated and measured. Every way trains the same ResNet on two ranks whose limit is enforced. Exit status 4 where weft's choice fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import weft
from bench.arithmetic import Row, Series, Target, as_json, judge, row
from bench.document import command, header, markdown, show, versions
from bench.measure import turn
from bench.pipeline import lines_of
from bench.processes import ROOT
from weft.errors import Infeasible, LayoutError, OutOfMemory
from weft.plan.plan import Plan
from weft.run.build import Traced
from weft.run.engine import Engine
from weft.schedules import build
from weft.simulate.clock import simulate
from weft.units import format_bytes, parse_bytes
from weft.world.launch import launch
from weft.world.world import World
from weft.zoo.resolve import resolve
from weft.zoo.resolved import Resolved

PAGE = ROOT / "docs" / "benchmarks" / "out_of_core.md"
OWN = "weft's choice"
SWAPS = "swap or drop"

INTRO = """Two ranks, each with the limit; all ways train the same model in float32 with AdamW from the same weights. Ratios are the other
way's time over that of weft's choice (more than 1: weft's choice is faster), by round, then their median; ways take turns within a round.
A way that exceeds the limit ends with the error that a user would see, and counts as not fitting. "swap or drop" is data parallelism for
whose every layer weft chooses whether its activations stay, move to the host or are made again."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train on two ranks: a layout, or what constrains weft's choice."""

    name: str
    layout: str = ""
    constraints: str = ""


def ways(microbatches: int) -> tuple[Way, ...]:
    """All that are compared, with so many microbatches where a way has them."""
    end = f"pipeline=2 microbatches={microbatches}"
    return (
        Way("MP-Basic", "pipeline=2 schedule=sequential"),
        Way("GPipe", f"{end} schedule=gpipe"),
        Way("1F1B", f"{end} schedule=1f1b"),
        Way("GEMS MAST", "pipeline=2 microbatches=2 schedule=gems-mast"),
        Way("GEMS MASTER", f"{end} schedule=gems-master"),
        Way("recompute", "data=2 recompute=full"),
        Way("offload", "data=2 offload=all"),
        Way(SWAPS, constraints="ranks=2 data=2 microbatches=1 zero=0 precision=float32 offload!=optimizer offload!=all"),
        Way(OWN, constraints="ranks=2 precision=float32"),
    )


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained: `model` of the zoo on images of `image` x `image`, `batch` of them a step."""

    model: str
    image: int
    batch: int

    @property
    def named(self) -> str:
        return f"{self.model}{',' if ':' in self.model else ':'}image={self.image}"


@dataclass(frozen=True, slots=True)
class Tried:
    """What a try gave: `why` it did not fit, or seconds, losses and the most bytes held."""

    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    held_bytes: float = 0.0
    layout: str = ""
    why: str = ""


class Tries:
    """Ways and sizes under one limit. What a model is traced and planned to is kept: ranks are forked from here, and inherit it."""

    def __init__(self, limit: float, cluster: str) -> None:
        self._limit, self._cluster = limit, cluster
        self._sources: dict[Size, tuple[Resolved, Any, Traced]] = {}
        self._prepared: dict[tuple[str, Size], Plan] = {}

    def _source(self, size: Size) -> tuple[Resolved, Any, Traced]:
        if size not in self._sources:
            subject = resolve(size.named)
            torch.manual_seed(0)
            self._sources[size] = subject, subject.batch(size.batch), Traced.of(subject.make)
        return self._sources[size]

    def prepare(self, size: Size, way: Way) -> Plan:
        """Raises Infeasible where weft knows beforehand that the way does not fit, or the batch does not divide."""
        if (way.name, size) not in self._prepared:
            self._prepared[way.name, size] = self._prepare(size, way)
        return self._prepared[way.name, size]

    def _prepare(self, size: Size, way: Way) -> Plan:
        subject, batch, source = self._source(size)
        plan = partial(weft.plan, subject, batch, cluster=self._cluster, source=source)
        return plan(layout=way.layout) if way.layout else plan(constraints=way.constraints, device_memory=self._limit)

    def run(self, size: Size, way: Way, steps: int) -> Tried:
        """Some steps of a way at a size."""
        limit = self._limit
        try:
            plan = self.prepare(size, way)
            subject, batch, source = self._source(size)
            source.prepare(plan, batch, subject.loss)

            def work(world: World) -> Any:
                engine = Engine(plan, subject.make, batch, subject.loss, world, seed=0, source=source, device_memory=limit)
                seconds, losses = [], []
                for _ in range(steps):
                    world.everyone.barrier()
                    began = time.perf_counter()
                    losses.append(engine.step(batch).loss)
                    seconds.append(time.perf_counter() - began)
                return [seconds, losses, engine.fullest_memory().get("total", 0.0)]

            seconds, losses, held = launch(work, 2, show=False)[0]
        except (OutOfMemory, Infeasible, LayoutError) as error:
            return Tried(why=str(error).splitlines()[0])
        return Tried(tuple(seconds), tuple(losses), held, str(plan.layout))


def largest(sizes: Iterable[Size], tries: Callable[[Size], Tried]) -> Size | None:
    """The last of ascending sizes that fits, as far as the first that does not."""
    found = None
    for size in sizes:
        if tries(size).why:
            break
        found = size
    return found


def shape_of_gems(numbers: Sequence[int], stages: Sequence[int]) -> list[tuple[int, int, float]]:
    """(stages, batches, speed-up of GEMS over MP-Basic) by the clock, with a backward of two forwards and free transfers.

    Jain et al. 2020: MAST trains two batches at a time, one a replica; MASTER goes on with as many as there are.
    """
    rows = []
    for d in stages:
        one = _simulated("sequential", d, 1)
        rows += [(d, n, n * one / _simulated("gems-master", d, n)) for n in numbers]
    return rows


def _simulated(schedule: str, stages: int, microbatches: int) -> float:
    seconds = {"F": 1.0, "B": 2.0}
    return simulate(build(schedule, stages, microbatches), lambda action: seconds[action.op.value], lambda *_: 0.0).total_s


def shape_table(simulated: Sequence[tuple[int, int, float]], measured: dict[tuple[int, int], float]) -> Table:
    """The shape of GEMS."""
    table = Table(title="GEMS beside MP-Basic: speed-up by number of batches", title_justify="left")
    for name in ("stages", "batches", "simulated", "measured"):
        table.add_column(name, justify="right")
    for d, n, ratio in simulated:
        shown = f"{measured[d, n]:.2f}" if (d, n) in measured else ""
        table.add_row(str(d), str(n), f"{ratio:.2f}", shown)
    return table


def sizes_table(found: dict[str, tuple[Size | None, Size | None, Tried]], limit: float) -> Table:
    """What each way trained at most."""
    table = Table(title=f"The largest that was trained within {format_bytes(limit)} a rank", title_justify="left")
    for name in ("way", "image", "batch", "images/s", "held at most", "layout, or why not"):
        table.add_column(name, justify="left" if name in ("way", "layout, or why not") else "right")
    for name, (image, batch, tried) in found.items():
        rate = f"{batch.batch / median(tried.seconds):.2f}" if batch and tried.seconds else ""
        table.add_row(
            name, str(image.image) if image else "none", str(batch.batch) if batch else "none", rate,
            format_bytes(tried.held_bytes) if tried.seconds else "", tried.layout or tried.why,
        )  # fmt: skip
    return table


TARGETS = (Target("weft's choice is the best or within 3 %", 0.97, lambda r: r.kind == "out of core"),)


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench out_of_core", description="training under a limit of memory", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, rows, sizes and the shape of GEMS to FILE")
    p.add_argument("--model", default="resnet-18")
    p.add_argument("--limit", default="2GiB", help="of each rank")
    p.add_argument("--images", type=int, nargs="+", default=[256, 384, 512, 640, 768, 1024, 1280, 1536], metavar="PIXELS")
    p.add_argument("--batches", type=int, nargs="+", default=[4, 8, 12, 16, 24, 32], metavar="N")
    p.add_argument("--image", type=int, default=512, help="for the largest batch, and for images a second")
    p.add_argument("--batch", type=int, default=8, help="for the largest image, and for images a second")
    p.add_argument("--microbatches", type=int, default=4)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--cluster", default="here")
    p.add_argument("--ways", nargs="+", choices=[w.name for w in ways(4)], default=[w.name for w in ways(4)])
    p.add_argument("--quick", action="store_true", help="a tiny model, few sizes, one round; does not write the page")
    given = p.parse_args(list(arguments))
    if given.quick:
        given.model, given.limit, given.images, given.batches = "resnet-tiny", "5MiB", [64, 128], [4, 8]
        given.image, given.batch, given.rounds, given.cluster = 64, 4, 1, "1xcpu-2"
    limit = parse_bytes(given.limit)
    chosen = [way for way in ways(given.microbatches) if way.name in given.ways]
    console = Console(soft_wrap=True) if not sys.stdout.isatty() else Console()
    about = header(
        command("out_of_core", arguments),
        versions(("torch",)),
        limit=f"{format_bytes(limit)} for each of two ranks, enforced",
        load=f"{os.getloadavg()[0]:.1f} processes were running before (a quiet machine has 0)" if hasattr(os, "getloadavg") else "unknown",
        measured=f"{given.rounds} rounds of 2 steps after 1, in turn; medians of ratios by round",
    )
    base = Size(given.model, given.image, given.batch)
    sizes: dict[str, tuple[Size | None, Size | None, Tried]] = {}
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    skipped: dict[str, str] = {}
    layouts: dict[str, str] = {}
    tries = Tries(limit, given.cluster)
    for way in chosen:
        image = largest((Size(given.model, n, given.batch) for n in given.images), partial(tries.run, way=way, steps=1))
        batch = largest((Size(given.model, given.image, n) for n in given.batches), partial(tries.run, way=way, steps=1))
        at_most = tries.run(batch or base, way, 2)
        sizes[way.name] = image, batch, at_most
        told = f"image {image.image if image else 'none'}, batch {batch.batch if batch else 'none'}"
        console.print(f"  {way.name}: {told} {at_most.why}", highlight=False, markup=False)
    for number in range(given.rounds):
        for name in turn([way.name for way in chosen if way.name not in skipped], number):
            tried = tries.run(base, next(way for way in chosen if way.name == name), 3)
            if tried.why:
                skipped[name] = tried.why
                seconds.pop(name, None)
                continue
            seconds.setdefault(name, []).append(median(tried.seconds[1:]))
            losses[name], layouts[name] = list(tried.losses), tried.layout
    series = {name: Series(name, tuple(s), losses=tuple(losses[name]), plan=layouts[name]) for name, s in seconds.items()}
    label = f"{given.model}, image {given.image}, batch {given.batch}"
    others = [one for name, one in series.items() if name != OWN]
    rows: list[Row] = [row(label, "out of core", series[OWN], one) for one in others] if OWN in series else []
    simulated = shape_of_gems((2, 4, 8, 16), (2, 4, 8))
    measured = {}
    if {"MP-Basic", "GEMS MASTER"} <= seconds.keys():
        # Both train the same batch: MP-Basic in one piece, GEMS in as many as it has microbatches.
        measured[2, given.microbatches] = median(a / b for a, b in zip(seconds["MP-Basic"], seconds["GEMS MASTER"], strict=True))
    verdicts = judge(TARGETS, rows, skipped)
    show(console, rows, verdicts, skipped)
    tables = [sizes_table(sizes, limit), shape_table(simulated, measured)]
    for table in tables:
        console.print(table)
    if given.json:
        more = {
            "limit_bytes": limit,
            "largest": {
                name: {"image": i.image if i else None, "batch": b.batch if b else None, **asdict(t)} for name, (i, b, t) in sizes.items()
            },
            "gems": [{"stages": d, "batches": n, "simulated": r, "measured": measured.get((d, n))} for d, n, r in simulated],
        }
        given.json.write_text(json.dumps(as_json(about, rows, verdicts, skipped) | more, indent=1) + "\n")
    if not given.quick:
        text = markdown(about, rows, verdicts, skipped, {label: list(series.values())}, INTRO, "training under a limit of memory")
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text("\n".join([text, *(line for table in tables for line in lines_of(table))]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    if OWN in skipped:
        print(f"weft: its own choice does not run: {skipped[OWN]}", file=sys.stderr)
    return 4 if OWN in skipped else 0
