"""`scripts/bench serve`: what placements of workflows cost beside others' ways to choose them, and how long choosing takes.

Workflows: JellyBean's public instance at every accuracy, and 30 drawn ones (4 to 6 operators in a random acyclic graph, 2 or 3 variants
each, 12 to 20 workers on 3 tiers); planning time on workflows of 12 operators and 60 workers. Out: rows in the terminal, `--json FILE`,
and docs/benchmarks/serve.md. Prices do not depend on the machine; times do.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from statistics import geometric_mean, median
from typing import Any

from bench.common.document import command, header, versions
from bench.common.processes import ROOT
from shardwise.serve.placement.assignment_milp import Demand, ServicePlan
from shardwise.serve.placement.baselines import greedy, one_size, two_steps
from shardwise.serve.placement.service_planner import plan_service
from shardwise.serve.placement.workflow import Machines, OperatorVariant, RequestSource, TierLink, WorkerGroup, Workflow, WorkflowOperator
from shardwise.serve.placement.workflow_files import read_workflow

PAGE = ROOT / "docs" / "benchmarks" / "serve.md"
DRAWN, LARGE, LIMIT_S = 30, 5, 5.0
Way = Callable[[Workflow, Machines, Demand], ServicePlan | None]
WAYS: dict[str, Way] = {"JellyBean's two steps": two_steps, "greedy": greedy, "one size, highest tier": one_size}


@dataclass(frozen=True, slots=True)
class Row:
    """Dollars an hour of shardwise's placement and of a peer's, None where it finds none; `ratio` above 1: shardwise's is cheaper."""

    case: str
    shardwise: float
    peer: float | None
    peer_name: str
    ratio: float | None
    unit: str = "$/h"
    bound_gap: float = 0.0


def drawn(seed: int, operators: int, workers: int, variants: Sequence[int]) -> tuple[Workflow, Machines, Demand]:
    """A workflow, machines and a demand that they can meet."""
    rng = random.Random(seed)
    tiers = [0, 1, 2] + [rng.choice((0, 0, 1, 1, 2)) for _ in range(workers - 3)]
    machines = tuple(WorkerGroup(f"w{i}", t, round(rng.uniform(0.05, 0.5) * 4**t, 3)) for i, t in enumerate(tiers))
    ops: list[WorkflowOperator] = []
    for i in range(operators):
        before = [op.name for op in ops] or ["camera"]
        inputs = rng.sample(before, min(len(before), rng.choice((1, 1, 2)))) if i else ["camera"]
        made = []
        for k in range(rng.choice(variants)):
            work = rng.uniform(0.02, 0.1) * (1 + 0.8 * k)
            latency = tuple((w.name, ((1, work / (1 + 2.5 * w.tier) * rng.uniform(0.8, 1.25)),)) for w in machines)
            made.append(OperatorVariant(f"v{k}", latency, rng.uniform(1e3, 3e5), 0.9 + 0.1 * (k + 1) / max(variants)))
        ops.append(WorkflowOperator(f"op{i}", tuple((name, rng.choice((0.5, 1.0, 1.0))) for name in inputs), tuple(made)))
    workflow = Workflow("drawn", (RequestSource("camera", rng.uniform(1e5, 1e6)),), tuple(ops))
    links = (TierLink("0", "1", 0.05), TierLink("1", "2", 0.08), TierLink("0", "2", 0.1))
    best, worst = (workflow.accuracy.base * prod(pick(v.factor for v in op.variants) for op in ops) for pick in (max, min))
    return workflow, Machines(machines, links), Demand(1.0, worst + 0.6 * (best - worst))


def _most(op: WorkflowOperator, machines: Machines) -> float:
    """Requests/s of an operator's first variant if every worker ran it."""
    return sum(w.count / op.variants[0].batches(w.name)[0][1] for w in machines.workers)


def loaded(workflow: Workflow, machines: Machines, ask: Demand, share: float) -> Demand:
    """The demand at a share of what the workers could do if each operator had its part of them."""
    most = min(_most(op, machines) / workflow.rates[op.name] for op in workflow.operators)
    return replace(ask, rate=share * most / len(workflow.operators))


def public() -> tuple[list[Row], list[float]]:
    workflow, machines, rate = read_workflow(ROOT / "examples" / "serve" / "vqa.toml")
    assert machines is not None
    return compared([(f"public, accuracy {level:g}", workflow, machines, Demand(rate, level)) for level in workflow.accuracy_levels()])


def compared(cases: Sequence[tuple[str, Workflow, Machines, Demand]]) -> tuple[list[Row], list[float]]:
    """A row for each case and way, and the seconds of planning."""
    rows, seconds = [], []
    for name, workflow, machines, ask in cases:
        placed = plan_service(workflow, machines, ask, 60.0)
        assert placed is not None, name
        seconds.append(placed.planning_time_s)
        for way, choose in WAYS.items():
            other = choose(workflow, machines, ask)
            price = other.price_per_hour if other is not None else None
            rows.append(
                Row(name, placed.price_per_hour, price, way, price / placed.price_per_hour if price else None, bound_gap=placed.bound_gap)
            )
    return rows, seconds


def main(arguments: list[str]) -> int:
    """Run all cases; exit status 0."""
    parser = argparse.ArgumentParser(prog="scripts/bench serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args(arguments)
    rows, seconds = public()
    cases = []
    for seed in range(DRAWN):
        rng = random.Random(1000 + seed)
        workflow, machines, ask = drawn(seed, rng.randint(4, 6), rng.randint(12, 20), (2, 3))
        cases.append((f"drawn {seed}", workflow, machines, loaded(workflow, machines, ask, rng.uniform(0.2, 0.6))))
    more, _ = compared(cases)
    rows += more
    large = []
    for seed in range(LARGE):
        workflow, machines, ask = drawn(seed, 12, 60, (2, 3))
        ask = loaded(workflow, machines, ask, 0.3)
        begun = time.perf_counter()
        placed = plan_service(workflow, machines, ask, LIMIT_S)
        large.append((time.perf_counter() - begun, placed.bound_gap if placed is not None else float("inf")))
    head = header(command("serve", arguments), versions(("highspy",)))
    text = page(head, rows, seconds, large)
    PAGE.write_text(text)
    print(text)
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"header": head, "rows": [asdict(row) for row in rows], "large": large}, file, indent=1)
    return 0


def page(head: dict[str, Any], rows: Sequence[Row], seconds: Sequence[float], large: Sequence[tuple[float, float]]) -> str:
    lines = ["# Placing workflows: prices and times", ""]
    lines += [f"`{head['command']}` on {head['machine']}, {head['date']}, highspy {head['versions'].get('highspy', '')}.", ""]
    gaps = {r.case: r.bound_gap for r in rows}
    proven, most = sum(gap < 1e-6 for gap in gaps.values()), max(gaps.values())
    lines += ["Dollars an hour; a ratio is the other's price over shardwise's."]
    lines += [
        f"shardwise's is proven to be the least in {proven} of {len(gaps)} cases; the largest gap to the bound after 60 s is {most:.1%}.",
        "",
    ]
    lines += ["| | cases | found | median | mean (geometric) | largest |", "|---|---|---|---|---|---|"]
    for title in ("public", "drawn"):
        for way in WAYS:
            mine = [r for r in rows if r.case.startswith(title) and r.peer_name == way]
            ratios = [r.ratio for r in mine if r.ratio is not None]
            told = [f"{f(ratios):.3f}" for f in (median, geometric_mean, max)] if ratios else ["", "", ""]
            lines.append(f"| {title}: {way} | {len(mine)} | {len(ratios)} | {' | '.join(told)} |")
    lines += ["", "The public instance:", "", "| accuracy | shardwise | " + " | ".join(WAYS) + " |", "|---|---|---|---|---|"]
    for case in dict.fromkeys(r.case for r in rows if r.case.startswith("public")):
        mine = {r.peer_name: r for r in rows if r.case == case}
        others = " | ".join(f"{mine[way].peer:.4f}" if mine[way].peer else "none fits" for way in WAYS)
        lines.append(f"| {case.rpartition(' ')[2]} | {mine[next(iter(WAYS))].shardwise:.4f} | {others} |")
    lines += ["", f"Planning the public instance takes {median(seconds):.2f} s (median), 12 operators on 60 workers:", ""]
    lines += ["| | seconds | above the proven bound |", "|---|---|---|"]
    lines += [f"| drawn {i} | {s:.1f} | {gap:.2%} |" for i, (s, gap) in enumerate(large)]
    return "\n".join(lines) + "\n"
