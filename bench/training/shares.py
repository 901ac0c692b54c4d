"""`scripts/bench shares`: a step with equal and with unequal shares of the batch where one rank is slower.

Two ranks have a core each. On the second one's core something else computes all the time, so that it gets about half of it. The planner is
given two hosts, of a core and of half a core, and chooses the shares. Engines of its plan and of `data=2` take turns in the same processes.
Out: seconds a step, in the terminal, in `--json FILE` and in docs/benchmarks/shares.md: medians of rounds, ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median

from bench.common.arithmetic import Row
from bench.common.document import command, header, opening, terminal, versions
from bench.common.measure import in_turns
from bench.common.processes import ROOT
from shardwise.api import plan as make_plan
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cluster.heterogeneous import mix_clusters
from shardwise.run.engine import Engine
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

PAGE = ROOT / "docs" / "benchmarks" / "shares.md"
MODEL, SAMPLES = "gpt:layers=4,hidden=256,heads=8,sequence=128,vocabulary=512", 12
EQUAL, LAYOUTS = "data=2", ("equal", "chosen")

INTRO = """Two ranks of one thread, each held to a core of its own. `slow`: on the second rank's core another process computes all the time;
`alone`: nothing else does. The planner was given a cluster of two hosts, of a core and of half a core, and chose the unequal shares.
Seconds a step, medians of rounds in which the layouts take turns; the ratio is that of a step with equal shares to that with the chosen
ones, by round: the median, and the least and the most. More than 1 means that unequal shares are faster. `alone` is the control: there
they must be slower."""


def hosts() -> Cluster:
    """A host of one core, and one of which another process has half."""
    link = NetworkLink(2e-5, 2.5e9)
    core = Device("core", "cpu", (("float32", 1e11),), 8e9, 1e10)
    half = Device("half a core", "cpu", (("float32", 5e10),), 8e9, 5e9)
    return mix_clusters("a core and half a core", [Cluster(one.name, one, (ClusterLevel("node", 1, link),)) for one in (core, half)], link)


@contextmanager
def busy(core: int | None) -> Iterator[None]:
    """A process that computes on a core meanwhile."""
    if core is None:
        yield
        return
    spinning = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    try:
        yield
    finally:
        spinning.kill()
        spinning.wait()


def measure(rounds: int, steps: int, slow: bool) -> list[list[float]]:
    """[round] -> seconds a step of each layout."""
    model = resolve(MODEL, SAMPLES)
    batch = model.batch(SAMPLES)
    chosen = make_plan(model, batch, cluster=hosts(), constraints="data=2 zero=0 precision=float32")
    plans = [make_plan(model, batch, cluster="1xcpu-2", layout=EQUAL), chosen]
    cores = sorted(os.sched_getaffinity(0))[:2]

    def on_rank(world: World) -> list[list[float]]:
        os.sched_setaffinity(0, {cores[world.rank % len(cores)]})
        engines = {layout: Engine(plan, model.make, batch, model.loss, world, seed=0) for layout, plan in zip(LAYOUTS, plans, strict=True)}
        ways = {layout: lambda engine=engine: float(engine.step(batch).loss) for layout, engine in engines.items()}  # type: ignore[misc]
        return [[took[layout] for layout in LAYOUTS] for took in in_turns(ways, rounds, steps, world.world_group.barrier)]

    with busy(cores[-1] if slow else None):
        return launch(on_rank, 2, timeout_s=600, show=False)[0]


def rows_of(name: str, found: list[list[float]]) -> Row:
    """One case's row.

    >>> rows_of("slow", [[0.3, 0.2], [0.2, 0.2]]).ratio
    1.25
    """
    ratios = [equal / unequal for equal, unequal in found]
    return Row(
        name, median(b for _, b in found), median(a for a, _ in found), "data=2", median(ratios), kind="shares", ratio_min=min(ratios),
        ratio_max=max(ratios),
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="scripts/bench shares", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--no-page", action="store_true", help=f"leave {PAGE.relative_to(ROOT)} as it is")
    given = parser.parse_args(arguments)
    rows = [rows_of(name, measure(given.rounds, given.steps, slow)) for name, slow in (("slow", True), ("alone", False))]
    lines = ["| case | equal | chosen | ratio | least to most |", "|---|---|---|---|---|"]
    for row in rows:
        spread = f"{row.ratio_min:.2f} to {row.ratio_max:.2f}"
        lines.append(f"| {row.case} | {row.peer * 1e3:.0f} ms | {row.shardwise * 1e3:.0f} ms | {row.ratio:.2f} | {spread} |")
    terminal().print("\n".join(lines), markup=False)
    about = header(command("shares", arguments), versions(("torch",)))
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"header": about, "rows": [asdict(row) for row in rows]}, file, indent=1)
    if not given.no_page:
        PAGE.write_text("\n".join([*opening("unequal shares", about, INTRO), *lines, ""]))
    return 0 if rows[0].ratio > 1 else 4


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
