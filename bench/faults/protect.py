"""`scripts/bench protect`: what it costs a step that the run loses none.

In: layouts. In the same processes two engines take turns: one as with `run.protect = "none"`, one as with `"memory"`, whose state is kept
after every step and checked before every update. Out: seconds a step of both, their ratio by round, and what keeping and checking take
alone; in the terminal, in `--json FILE` and in docs/benchmarks/protect.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.measure import in_turns
from bench.common.processes import ROOT
from shardwise.api import plan as make_plan
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.recovery.fingerprints import fingerprint_of
from shardwise.run.recovery.snapshots import Snapshots, required_bytes
from shardwise.train.recovery.anomalies import loss_anomaly
from shardwise.train.recovery.step_guard import StepGuard
from shardwise.units import format_bytes
from shardwise.world.launch.launch import ENGINE, launch
from shardwise.world.launch.watch import RecoveryPolicy
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

PAGE = ROOT / "docs" / "benchmarks" / "protect.md"
LAYOUTS = (
    "data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=4", "pipeline=2 microbatches=4 schedule=zb-h1",
)  # fmt: skip
MODEL, QUICK = "gpt-10m:sequence=256", "gpt-tiny:vocabulary=256,sequence=32"
BATCH = 8
NONE, MEMORY = "none", "memory"
INTRO = """Two engines train the same model in turns, in the same processes, a rank has both. `none`: as with `run.protect = "none"`, where
replicas still tell their fingerprints. `memory`: as with the default; after each step its state is copied into memory that outlives the
rank, before each update its bits are compared with what the last update left, and the norms of all ranks' gradients are told. `cost`: how
much longer a step is with protection, by round: the median, the least and the most. `keeping`: seconds of the copy and of the sums of
words that go with it, `checking`: of the sums before the next update, of the rank that took longest. `kept`: bytes of a rank."""


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds a step by way in every round; of the slowest rank `keeping_s` and `checking_s` a step; `kept` bytes of the fullest rank."""

    layout: str
    rounds: list[dict[str, float]]
    keeping_s: float
    checking_s: float
    kept: int

    @property
    def costs(self) -> list[float]:
        """By round, how much longer a step is with protection, as a part of one without.

        >>> [round(x, 3) for x in Found("data=2", [{"none": 2.0, "memory": 2.1}], 0.0, 0.0, 0).costs]
        [0.05]
        """
        return [one[MEMORY] / one[NONE] - 1 for one in self.rounds]


@dataclass
class _Protected:
    """Steps as `shardwise train` makes them with `run.protect = "memory"`."""

    world: World
    engine: Engine
    batch: Any
    losses: list[float] = field(default_factory=list)
    keeping: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshots = Snapshots(self.world, self.engine.state())
        self.snapshots.take(0, {})
        self._trust = StepGuard(self.world, self.engine, self.snapshots, self.losses, str)

    def step(self) -> None:
        step = self.engine.step_index
        made = self._trust.run_step(
            step, lambda: self.engine.step(self.batch), lambda r: loss_anomaly(r.loss, r.grad_norm, False, self.losses), print
        )
        began = time.perf_counter()
        self.snapshots.take(step + 1, {"loss": made.loss, "grad_norm": made.grad_norm})
        self._trust.record_state()
        self.keeping.append(time.perf_counter() - began)
        self.losses.append(made.loss)


def on_rank(world: World, layout: str, model: str, rounds: int, steps: int) -> dict[str, Any]:
    """What one rank finds."""
    made = resolve(model, BATCH)
    batch = made.batch(BATCH)
    plan = make_plan(made, batch, cluster="1xcpu-2", layout=f"{layout} threads=1")
    source = CachedModelSource.from_model(made.make)
    plain, kept = (Engine(plan, source, batch, made.loss, world, seed=0) for _ in range(2))
    protected = _Protected(world, kept, batch)
    ways: Mapping[str, Callable[[], Any]] = {NONE: lambda: plain.step(batch).loss, MEMORY: protected.step}
    found = in_turns(ways, rounds, steps, world.world_group.barrier)
    checking = []
    for _ in range(rounds):
        world.world_group.barrier()
        began = time.perf_counter()
        for x in kept.state().mutable:
            fingerprint_of(x)
        checking.append(time.perf_counter() - began)
    return {"rounds": found, "keeping": median(protected.keeping), "checking": median(checking), "kept": required_bytes(kept.state())}


def measure(layout: str, model: str, rounds: int, steps: int) -> Found:
    """A layout, on as many ranks as it has."""
    ranks = Layout.parse(layout).num_ranks
    each = launch(on_rank, ranks, layout, model, rounds, steps, threads=1, preload=ENGINE, recovery=RecoveryPolicy(), show=False)
    largest = [max(one[name] for one in each) for name in ("keeping", "checking", "kept")]
    slowest = [{way: max(one["rounds"][n][way] for one in each) for way in (NONE, MEMORY)} for n in range(rounds)]
    return Found(layout, slowest, *largest)


def table(found: Sequence[Found]) -> Table:
    """A row a layout."""
    out = Table(title="A step without and with protection", title_justify="left")
    for name in ("layout", "none, s", "memory, s", "cost", "least", "most", "keeping, s", "checking, s", "kept"):
        out.add_column(name, justify="left" if name == "layout" else "right")
    for one in found:
        seconds = [f"{median(r[way] for r in one.rounds):.4f}" for way in (NONE, MEMORY)]
        costs = [f"{100 * x:.1f} %" for x in (median(one.costs), min(one.costs), max(one.costs))]
        out.add_row(one.layout, *seconds, *costs, f"{one.keeping_s:.4f}", f"{one.checking_s:.4f}", format_bytes(one.kept))
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench protect", description="what protection costs a step", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and every round to FILE")
    p.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    p.add_argument("--model", default=MODEL)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--steps", type=int, default=3, help="of either in a round")
    p.add_argument("--quick", action="store_true", help="a tiny model in one layout, two rounds; does not write the page")
    given = p.parse_args(list(arguments))
    rounds, steps, model = (2, 2, QUICK) if given.quick else (given.rounds, given.steps, given.model)
    measured = f"{rounds} rounds of {steps} steps of either, in turns; {model}, batches of {BATCH}, AdamW, float32"
    about = header(command("protect", arguments), versions(("torch",)), load=load(), measured=measured)
    console, found = terminal(), list[Found]()
    for layout in given.layouts[:1] if given.quick else given.layouts:
        console.print(layout)
        found.append(measure(layout, model, rounds, steps))
    made = table(found)
    console.print(made)
    if given.json:
        rows = [{"case": one.layout, "shardwise": median(r[MEMORY] for r in one.rounds), "peer": median(r[NONE] for r in one.rounds),
                 "peer_name": "run.protect = none", "ratio": 1 + median(one.costs), "unit": "s"} for one in found]  # fmt: skip
        given.json.write_text(json.dumps({"about": about, "rows": rows, "found": [asdict(one) for one in found]}, indent=1) + "\n")
    if not given.quick:
        PAGE.write_text("\n".join([*opening("protection", about, INTRO), *lines_of(made)]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
