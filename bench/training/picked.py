"""`scripts/bench picked`: experts and long sequences: what the planner picks by itself, beside data parallelism alone.

The planner is given the model, the batch and this machine as it was measured, and two ranks. Engines of its plan, of `data=2`, and of the
split that is named after what is long or many (`data=2 expert=2`, `context=2`) take turns in the same processes. Out: seconds a step and of
the busiest rank's processor, in the terminal, in `--json FILE` and in docs/benchmarks/picked.md: medians of rounds, ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.common.document import command, header, load, opening, terminal, versions
from bench.common.measure import turn
from bench.common.processes import ROOT
from shardwise.api import plan as make_plan
from shardwise.run.engine import Engine
from shardwise.units import format_seconds
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

PAGE = ROOT / "docs" / "benchmarks" / "picked.md"
ALONE = "data=2"


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch, and what else is run."""

    name: str
    model: str
    batch: int
    other: str


MOE = "moe:layers=4,hidden=256,heads=8,sequence=64,vocabulary=256,experts=16,inner=1024,capacity=2"
LONG = "gpt:vocabulary=256,sequence=16384,hidden=64,layers=1,heads=1,positions=rotary"
CASES = {
    "experts": Case("experts", MOE, 4, "data=2 expert=2"),
    "long sequences": Case("long sequences", LONG, 3, "context=2"),
}

INTRO = """Two ranks of one thread. `experts`: four layers, two of them with 16 experts of 256 x 1,024, on 4 samples of 64 bytes, so that
weights, their gradients and the optimizer outweigh the compute. `long sequences`: 3 samples of 16,384 bytes, of which `data=2` gives one
rank two. The pick is the planner's, under `ranks=2 precision=float32 lend=off`; rows of one case took turns in the same processes. The
ratio is that of a step under `data=2` to one under the row's layout, by round: the median, and the least and the most. *processor*: the
same of the processor's seconds of the rank that used most, which other work on the machine changes less than the clock: ranks of
`context=2` and `tensor=2` meet in every layer, and each meeting waits for whichever rank the kernel runs last."""


@dataclass(frozen=True, slots=True)
class Row:
    """One layout of a case. Lists are by round: seconds a step, and the processor's of the busiest rank."""

    case: str
    what: str
    layout: str
    predicted_s: float
    step_s: list[float]
    processor_s: list[float]


def measure(case: Case, cluster: str, rounds: int, steps: int) -> list[Row]:
    """The rows of one case."""
    model = resolve(case.model)
    batch = model.batch(case.batch)
    given = {ALONE: "data parallelism alone", case.other: "by its name"}
    picked = make_plan(model, batch, cluster=cluster, constraints="ranks=2 precision=float32 lend=off")
    plans = {what: make_plan(model, batch, cluster=cluster, layout=f"{text} precision=float32") for text, what in given.items()}
    plans = {"the planner's pick": picked} | plans

    def on_rank(world: World) -> list[dict[str, tuple[float, float]]]:
        engines = {what: Engine(plan, model.make, batch, model.loss, world, seed=0) for what, plan in plans.items()}
        ways = {what: lambda engine=engine: float(engine.step(batch).loss) for what, engine in engines.items()}  # type: ignore[misc]
        for step in ways.values():
            step()
        return [{what: _timed(ways[what], steps, world) for what in turn(list(ways), r)} for r in range(rounds)]

    ranks = launch(on_rank, 2, timeout_s=900, show=False)
    return [
        Row(
            case.name, what, str(plan.layout), plan.prediction.step_time_s if plan.prediction else 0.0, [r[what][0] for r in ranks[0]],
            [max(of_rank[r][what][1] for of_rank in ranks) for r in range(rounds)],
        )
        for what, plan in plans.items()
    ]  # fmt: skip


def _timed(step: Callable[[], float], steps: int, world: World) -> tuple[float, float]:
    world.world_group.barrier()
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    used = time.process_time() - used
    world.world_group.barrier()
    return (time.perf_counter() - began) / steps, used / steps


def ratio(of: Sequence[float], over: Sequence[float]) -> str:
    """Of two lists by round.

    >>> ratio([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
    '3.00 (2.00 to 4.00)'
    """
    each = [a / b for a, b in zip(of, over, strict=True)]
    return f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


def table(rows: Sequence[Row]) -> list[str]:
    """As lines of Markdown."""
    lines = ["| case | plan | layout | predicted | a step | data=2 over it | processor |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        alone = next(r for r in rows if r.case == row.case and r.what == "data parallelism alone")
        seconds = [format_seconds(s) for s in (row.predicted_s, median(row.step_s))]
        ratios = [ratio(alone.step_s, row.step_s), ratio(alone.processor_s, row.processor_s)]
        lines.append(f"| {' | '.join([row.case, row.what, f'`{row.layout}`', *seconds, *ratios])} |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench picked", description=(__doc__ or "").partition("\n\n")[0])
    p.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    p.add_argument("--cluster", default="here", help="this machine as it was measured, or a file of it")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--json", metavar="FILE", type=Path)
    p.add_argument("--no-page", action="store_true", help=f"leave {PAGE.relative_to(ROOT)} as it is")
    given = p.parse_args(list(arguments))
    about = header(command("picked", arguments), versions(("torch",)), load=load())
    rows = [row for name in given.cases for row in measure(CASES[name], given.cluster, given.rounds, given.steps)]
    lines = table(rows)
    terminal().print("\n".join(lines), markup=False)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if not given.no_page and len(given.cases) == len(CASES):
        PAGE.write_text("\n".join([*opening("the planner's pick for experts and long sequences", about, INTRO), *lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
