"""`scripts/bench faults`: one fault after another in running trainings, and how long each was felt.

In: layouts. Every layout trains twice, calm and harmed. Out, by fault: seconds from it to the launcher's first word and to the next
finished step, and whether the losses of the whole run are, bit for bit, those of the calm one; in the terminal, in `--json FILE` and in
docs/benchmarks/faults.md. Not measured: other launchers; faults of the network and of the disk (`tests/torch/test_checkpoint_faults.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from bench.document import command, header, lines_of, load, opening, terminal, versions
from bench.processes import ROOT
from weft.api import plan as make_plan
from weft.plan.plan import Plan
from weft.run.engine import Engine
from weft.run.step.result import StepResult
from weft.train import flow, loop
from weft.train.config import Config
from weft.train.flow import Planned
from weft.train.metrics import read_metrics
from weft.train.subject import Subject
from weft.world.launch import launch
from weft.world.watch import Recovery
from weft.world.world import World

PAGE = ROOT / "docs" / "benchmarks" / "faults.md"
LAYOUTS = (
    "data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=4", "pipeline=2 microbatches=4 schedule=zb-h1",
    "data=2 tensor=2",
)  # fmt: skip
AWAY_S = 1.0
APART = 14  # steps between two faults: more than a jump of the loss is told by
CONFIG = """
[model]
name = "gpt:vocabulary=256,hidden=32,layers=2,heads=2"
[data]
sequence = 16
[train]
batch = 8
learning_rate = 0.001
checkpoint_every = 25
[run]
sample = 0
"""
INTRO = """A small GPT trains on text while ranks come to harm, one fault after another in one run, each some steps after the one before.
`noticed`: from the fault to the launcher's first word of it; `next step`: from the fault to the next step that is told; medians over the
layouts, and the most. `same losses`: of how many runs with this fault the losses of all steps are, bit for bit, those of the run without
faults. A rank that hangs has `run.hang_after_s`, 5 s; one that is stopped is told by the kernel. What is at fault in memory or arithmetic
is noticed within its own step. Where the process that forks the ranks is lost, all of them begin again from the last checkpoint: that
takes the start of a run, and repeats up to 25 steps."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`where`: before or after a rank's step, or `outside`, at a random time, by another process. `ranks`: whose; -1 all of them, -2 the
    process that forks them. `replicas`: only of layouts whose ranks have the same weights."""

    name: str
    how: str
    ranks: tuple[int, ...] = (1,)
    where: str = "before"
    replicas: bool = False


FAULTS = (
    *(Fault(f"kill -9 of rank {rank} {where} its step", "SIGKILL", (rank,), where) for where in ("before", "after") for rank in (0, 1)),
    *(Fault(f"kill -9 of a rank at a random time, {n}", "SIGKILL", (n % 2,), "outside") for n in range(6)),
    Fault("kill -9 of all ranks at once", "SIGKILL", (-1,), "outside"),
    Fault("kill -9 of the new rank, too", "again", (1,), "outside"),
    *(Fault(f"{name} of a rank", name, (1,)) for name in ("SIGSEGV", "SIGABRT", "SIGBUS")),
    Fault("a rank exits", "exit", (0,)),
    *(Fault(f"SIGSTOP of rank {rank}", "SIGSTOP", (rank,)) for rank in (0, 1)),
    Fault("SIGSTOP of a rank at a random time", "SIGSTOP", (0,), "outside"),
    Fault("a rank sleeps for ever", "sleep", (1,)),
    Fault("a rank holds the interpreter", "hold", (0,)),
    Fault("a bit of a weight is flipped on one replica", "flip", (1,), replicas=True),
    Fault("a loss that is not a number, once", "nan", (0, 1)),
    Fault("a loss that jumps, once", "jump", (0, 1)),
    Fault("kill -9 of the process that forks ranks", "SIGKILL", (-2,), "outside"),
    Fault("SIGSTOP of the process that forks ranks", "SIGSTOP", (-2,), "outside"),
)


@dataclass(frozen=True, slots=True)
class Felt:
    """One fault in one layout, in seconds; `same`: the run's losses are those of the calm one."""

    name: str
    layout: str
    noticed_s: float
    next_step_s: float
    same: bool


def harmed(world: World, folder: str, peak_flops: float) -> dict[str, Any]:
    """What a rank runs: a training that follows the orders in its folder, each once."""
    where = Path(folder)
    orders: list[dict[str, Any]] = json.loads((where.parent / "orders.json").read_text())

    def make(world: World, job: loop.Job, subject: Subject) -> Engine:
        engine = loop.make_engine(world, job, subject)
        steps = engine.step

        def step(batch: Any, **options: Any) -> StepResult:
            now = [o for o in orders if o["step"] == engine.step_index and world.rank in o["ranks"] and _first(where, o, world.rank)]
            for order in now:
                if order["where"] == "before":
                    _harm(order["how"], engine)
            result = steps(batch, **options)
            for order in now:
                if order["where"] == "after":
                    _harm(order["how"], engine)
                if order["how"] in ("nan", "jump"):
                    result = replace(result, total=result.total * (math.nan if order["how"] == "nan" else 50))
            return result

        engine.step = step  # type: ignore[method-assign]
        return engine

    return loop.train(world, flow.job_of(world, folder, peak_flops), make)


def _first(folder: Path, order: dict[str, Any], rank: int) -> bool:
    """Whether an order has not been followed yet; writes down when it is."""
    try:
        with open(folder.parent / f"harmed-{order['number']}-{rank}", "x") as file:
            file.write(repr(time.monotonic()))
    except FileExistsError:
        return False
    return True


def _harm(how: str, engine: Engine) -> None:
    match how:
        case "exit":
            os._exit(3)
        case "sleep":
            time.sleep(3600)
        case "hold":
            ctypes.PyDLL(None).sleep(3600)
        case "flip":
            engine.parts.groups[0].data.view(torch.int32)[5] ^= 1 << 7
        case "nan" | "jump":
            pass
        case _:
            os.kill(os.getpid(), getattr(signal, how))


class Watcher:
    """Follows one run: when what was said, when which step was told; and does what is done from outside."""

    def __init__(self, folder: Path, outside: dict[int, tuple[int, Fault]]) -> None:
        self.said: list[tuple[float, str]] = []
        self.told: list[tuple[float, int]] = []
        self.harmed: dict[int, float] = {}
        self._path, self._outside = folder / "metrics.jsonl", dict(sorted(outside.items()))
        self._draw, self._done = random.Random(0), threading.Event()
        self._again: int | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def heard(self, text: str) -> None:
        """The launcher says something."""
        self.said.append((time.monotonic(), text))
        if self._again is not None and "takes its place" in text:
            rank, self._again = self._again, None
            threading.Thread(target=self._kill_new, args=(rank,), daemon=True).start()

    def _kill_new(self, rank: int) -> None:
        time.sleep(0.05)
        for pid in _ranks()[-1:]:
            _send(pid, signal.SIGKILL)

    def _work(self) -> None:
        while not self._done.is_set():
            rows = self._path.read_bytes().count(b"\n") if self._path.exists() else 0
            if not self.told or self.told[-1][1] != rows:
                self.told.append((time.monotonic(), rows))
            for step in [s for s in self._outside if s <= rows]:
                self._inflict(*self._outside.pop(step))
            time.sleep(0.001)

    def _inflict(self, number: int, fault: Fault) -> None:
        time.sleep(self._draw.uniform(0, 0.03))
        ranks = _ranks()
        chosen = ranks if fault.ranks == (-1,) else _nests() if fault.ranks == (-2,) else [ranks[i] for i in fault.ranks if i < len(ranks)]
        self._again = fault.ranks[0] if fault.how == "again" else None
        self.harmed[number] = time.monotonic()
        for pid in chosen:
            _send(pid, signal.SIGKILL if fault.how == "again" else getattr(signal, fault.how))


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _below(pid: int) -> list[int]:
    return [int(p) for task in Path(f"/proc/{pid}/task").glob("*") for p in (task / "children").read_text().split()]


def _nests() -> list[int]:
    """The processes that fork ranks: children of the prepared one, which is this process's."""
    return [nest for prepared in _below(os.getpid()) for nest in _below(prepared)]


def _ranks() -> list[int]:
    return sorted(rank for nest in _nests() for rank in _below(nest))


def _config(folder: Path, layout: str, steps: int) -> Config:
    text = folder.parent / "text.txt"
    text.write_bytes(b"\n".join(page.read_bytes() for page in sorted((ROOT / "docs").glob("*.md"))))
    threads = f"plan.layout={layout} threads=1"
    return Config.parse(CONFIG, changes=[f"data.text={text}", f"run.folder={folder}", f"train.steps={steps}", threads])


def _planner(config: Config, known: Plan | None) -> Planned:
    plan = known or make_plan(config.model.name, config.train.batch, cluster="2xcpu-2", layout=config.plan.layout)
    return Planned(replace(plan, batch_size=config.train.batch), 0.0, "cpu")


def _losses(folder: Path) -> list[float]:
    return [float(row["loss"] or 0.0) for row in read_metrics(folder / "metrics.jsonl")]


def measure(layout: str, faults: Sequence[Fault], parent: Path) -> list[Felt]:
    """All faults, one after another, in one run of a layout."""
    steps = APART * (len(faults) + 2)
    at = {number: APART * (number + 1) for number in range(len(faults))}
    (parent / "orders.json").write_text("[]")
    calm, folder = parent / "calm", parent / "harmed"
    flow.train(_config(calm, layout, steps), _planner)
    orders = [{"number": n, "step": at[n], **asdict(f)} for n, f in enumerate(faults) if f.where != "outside"]
    (parent / "orders.json").write_text(json.dumps(orders))
    outside = {at[n]: (n, f) for n, f in enumerate(faults) if f.where == "outside"}
    before = flow.launch, flow.rank_main
    with Watcher(folder, outside) as watcher:

        def launched(function: Any, *args: Any, recovery: Recovery, **options: Any) -> Any:
            return launch(function, *args, recovery=replace(recovery, say=watcher.heard), **options)

        flow.launch, flow.rank_main = launched, harmed
        try:
            flow.train(_config(folder, layout, steps), _planner)
        finally:
            flow.launch, flow.rank_main = before
    same = _losses(folder) == _losses(calm)
    return [_felt(fault, layout, watcher, _when(n, parent, watcher), at[n], same) for n, fault in enumerate(faults)]


def _when(number: int, parent: Path, watcher: Watcher) -> float:
    written = [float(path.read_text()) for path in parent.glob(f"harmed-{number}-*")]
    return max([*written, *([watcher.harmed[number]] if number in watcher.harmed else [])], default=math.nan)


def _felt(fault: Fault, layout: str, watcher: Watcher, when: float, step: int, same: bool) -> Felt:
    noticed = next((t - when for t, _ in watcher.said if t > when), math.nan)
    after = 0.0 if math.isnan(noticed) else noticed
    if fault.ranks == (-2,):  # what the ranks had under way is told before they end; then they begin again
        after = AWAY_S
    done = max([step, *(rows for t, rows in watcher.told if t <= when)])
    later = next((t - when for t, rows in watcher.told if t > when + after and rows > done), math.nan)
    if fault.ranks == (-2,):
        noticed = math.nan  # said by who starts the ranks again
    if fault.how in ("flip", "nan", "jump"):
        noticed = later = math.nan  # said and mended by the ranks, within the step
    return Felt(fault.name, layout, noticed, later, same)


def table(found: Sequence[Felt]) -> Table:
    """A row a fault."""
    out = Table(title="Faults", title_justify="left")
    for name in ("fault", "noticed, s", "most", "next step, s", "most", "same losses"):
        out.add_column(name, justify="left" if name == "fault" else "right")
    for name in dict.fromkeys(one.name for one in found):
        mine = [one for one in found if one.name == name]
        cells = []
        for values in ([one.noticed_s for one in mine], [one.next_step_s for one in mine]):
            known = [v for v in values if not math.isnan(v)]
            cells += [f"{median(known):.3f}", f"{max(known):.3f}"] if known else ["", ""]
        out.add_row(name, *cells, f"{sum(one.same for one in mine)} of {len(mine)}")
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench faults", description="faults in running trainings", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and every fault to FILE")
    p.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    p.add_argument("--quick", action="store_true", help="four kinds of faults in one layout; does not write the page")
    given = p.parse_args(list(arguments))
    about = header(command("faults", arguments), versions(("torch",)), load=load(), measured="one run a layout, with all its faults")
    console, found = terminal(), list[Felt]()
    for layout in given.layouts[:1] if given.quick else given.layouts:
        copies = layout.startswith("data") and "zero=3" not in layout
        faults = [f for f in FAULTS if copies or not f.replicas]
        faults = [f for f in faults if f.how in ("SIGKILL", "SIGSTOP", "exit", "nan") and f.ranks != (-2,)][::3] if given.quick else faults
        console.print(f"{layout}: {len(faults)} faults")
        with tempfile.TemporaryDirectory() as folder:
            found += measure(layout, faults, Path(folder))
    made = table(found)
    console.print(made)
    none = {"peer": None, "peer_name": "", "ratio": None, "unit": "s"}
    rows = [{"case": f"{one.name}, {one.layout}", "weft": one.next_step_s, **none} for one in found]
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": rows, "found": [asdict(f) for f in found]}, indent=1) + "\n")
    if not given.quick:
        PAGE.write_text("\n".join([*opening("faults", about, INTRO), *lines_of(made)]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
