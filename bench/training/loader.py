"""`scripts/bench loader`: batches beside torch's DataLoader, of the same samples by the same function, and how long a loop waits for them.

Out: seconds a batch where nothing else is done, and the seconds that a loop waits whose steps take as long as one of the cases says.
Rounds are interleaved: every contender makes its batches once a round, one after the other.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from bench.common.arithmetic import Row, Series, row
from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.processes import ROOT
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import open_data
from shardwise.train.data.loader import Loader
from shardwise.train.training_task import training_task_of

PAGE = ROOT / "docs" / "benchmarks" / "loader.md"
INTRO = """Batches of `shardwise train` beside `torch.utils.data.DataLoader`, which is given the same samples by the same function: what
differs is how batches are prepared ahead. shardwise has threads, since decoding lets other threads run; the DataLoader has processes,
which send
batches through shared memory. "alone" is the time of a batch where nobody computes; "wait" is what a loop waits for a batch while each step
keeps one core busy for as long as a batch takes to prepare. Ratios are the DataLoader's time over shardwise's: more than 1 means that
shardwise is
better."""


class Samples(torch.utils.data.Dataset[Any]):
    """A batch by its step, for a DataLoader without collation."""

    def __init__(self, make: Callable[[int], Any], count: int) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, step: int) -> Any:
        return self.make(step)


def images(folder: Path, count: int, side: int) -> Callable[[int], Any]:
    """Batches of 16 photographs' size, decoded, cropped and turned as training wants them."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for i in range(count):
        where = folder / "photos" / f"class{i % 4}"
        where.mkdir(parents=True, exist_ok=True)
        coarse = draw.integers(0, 255, (side // 16, side // 16, 3), np.uint8)
        Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC).save(where / f"{i}.jpg", quality=90)
    return source(folder, f'source = "images"\npath = "{folder / "photos"}"\naugment = "crop"', "resnet-18:image=224", 16)


def text(folder: Path) -> Callable[[int], Any]:
    """Batches of 32 samples of 1,024 bytes of this Python's sources."""
    return source(folder, "sequence = 1024", "gpt:vocabulary=256,sequence=1024,hidden=64,layers=1,heads=1", 32)


def source(folder: Path, data: str, model: str, batch: int) -> Callable[[int], Any]:
    config = TrainingConfig.parse(f'[model]\nname = "{model}"\n[data]\n{data}\n[train]\nbatch = {batch}')
    subject = training_task_of(config, open_data(config.data, model, folder / "run"))
    return partial(subject.source.train, rows=range(batch))


def contenders(make: Callable[[int], Any], count: int, workers: int) -> dict[str, Callable[[], Iterator[Any]]]:
    """What makes `count` batches, by name; shardwise's first."""

    def ours() -> Iterator[Any]:
        with Loader(make, 0, count, workers=workers) as loader:
            yield from loader

    def theirs(processes: int) -> Iterator[Any]:
        ahead = {"prefetch_factor": 2} if processes else {}
        yield from torch.utils.data.DataLoader(Samples(make, count), batch_size=None, num_workers=processes, **ahead)

    names = {f"DataLoader, {n} processes" if n else "DataLoader, none": partial(theirs, n) for n in (0, workers)}
    return {"shardwise": ours, **names}


def waits(batches: Iterator[Any], step_s: float) -> float:
    """Mean seconds that a loop waits for a batch, the first left out, while each step computes for `step_s`."""
    waited, count = 0.0, 0
    while True:
        began = time.perf_counter()
        if next(batches, None) is None:
            return waited / max(1, count - 1)
        if count:
            waited += time.perf_counter() - began
        count += 1
        until = time.perf_counter() + step_s
        a = torch.ones(256, 256)
        while time.perf_counter() < until:  # with the interpreter free, as kernels leave it
            a = torch.mm(a, a).clamp_(max=1)


def alone(batches: Iterator[Any]) -> float:
    """Mean seconds of a batch, the first left out: processes are started in it."""
    next(batches)
    began, count = time.perf_counter(), 0
    for _ in batches:
        count += 1
    return (time.perf_counter() - began) / count


def measure(case: str, make: Callable[[int], Any], count: int, rounds: int, workers: int) -> list[Row]:
    """Rows of one case: alone, and waiting in steps that take as long as a batch."""
    began = time.perf_counter()
    make(0)
    step_s = max(0.002, time.perf_counter() - began)
    found: list[Row] = []
    for kind, how in (("alone", alone), ("wait", partial(waits, step_s=step_s))):
        makers = contenders(make, count, workers)
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(rounds):
            for name, start in makers.items():
                seconds[name].append(max(1e-9, how(start())))
        series = {name: Series(name, tuple(values)) for name, values in seconds.items()}
        ours = series.pop("shardwise")
        label = f"{case}, {kind}" if kind == "alone" else f"{case}, wait in steps of {1000 * step_s:.0f} ms"
        found += [replace(row(label, kind, ours, peer), unit="s/batch") for peer in series.values()]
    return found


def table(rows: Sequence[Row]) -> Table:
    """Rows for people."""
    out = Table(title="Batches", title_justify="left")
    for name in ("case", "beside", "shardwise, ms", "beside it, ms", "ratio", "from", "to"):
        out.add_column(name, justify="left" if name in ("case", "beside") else "right")
    for r in rows:
        times, ratios = (r.shardwise, r.peer), (r.ratio, r.ratio_min, r.ratio_max)
        out.add_row(r.case, r.peer_name, *(f"{1000 * s:.2f}" for s in times), *(f"{x:.2f}" for x in ratios))
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench loader", description="batches beside torch's DataLoader", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and rows to FILE")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--batches", type=int, default=24, help="that each contender makes in a round")
    p.add_argument("--workers", type=int, default=2, help="threads of shardwise, processes of the DataLoader")
    p.add_argument("--quick", action="store_true", help="one round of few batches; does not write the page")
    given = p.parse_args(list(arguments))
    rounds, count = (1, 4) if given.quick else (given.rounds, given.batches)
    about = header(
        command("loader", arguments), versions(("torch", "pillow")), load=load(),
        measured=f"{rounds} interleaved rounds of {count} batches; {given.workers} threads or processes; one thread of torch",
    )  # fmt: skip
    torch.set_num_threads(1)
    console = terminal()
    with tempfile.TemporaryDirectory() as folder:
        cases = {"images": images(Path(folder), 16 if given.quick else 64, 500), "text": text(Path(folder))}
        rows = [r for case, make in cases.items() for r in measure(case, make, count, rounds, given.workers)]
    console.print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
    if not given.quick:
        PAGE.write_text("\n".join([*opening("loading data", about, INTRO), *lines_of(table(rows))]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
