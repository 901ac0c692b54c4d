"""`scripts/bench pipeline`: shardwise's pipelines beside torch.distributed.pipelining, schedule by schedule, on small and on large stages.

Out: rows and verdicts in the terminal, `--json FILE`, and docs/benchmarks/pipeline.md, with what the executor adds to the compute and how
measured steps lie beside simulated ones. Exit status 0 also where a target is missed; 4 where shardwise itself does not run or computes
another loss than its peer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from bench.common.arithmetic import Row, Series, Target, as_json, judge, row, wrong
from bench.common.case import Case, Contender
from bench.common.contenders import shardwise
from bench.common.document import command, header, lines_of, load, markdown, show, terminal, versions
from bench.common.measure import Effort, measure
from bench.common.processes import ROOT
from bench.training.executor import Beside, Overhead, beside, overhead

PAGE = ROOT / "docs" / "benchmarks" / "pipeline.md"
MOST_US = 60.0

SMALL = Case("gpt:layers=8,hidden=64,heads=4,sequence=32,vocabulary=256", batch=16, sequence=32, microbatches=8)
LARGE = Case("gpt-10m", batch=8, sequence=256, microbatches=4)
CASES = {"small": SMALL, "large": LARGE}
# shardwise's schedule, the peer's, and the stages that each rank has
PAIRS = (
    ("gpipe", "GPipe", 1),
    ("1f1b", "1F1B", 1),
    ("interleaved", "Interleaved1F1B", 2),
    ("zb-h1", "InterleavedZeroBubble", 1),
    ("zb-v", "ZBVZeroBubble", 2),
)
# All that shardwise runs, simulated and measured.
SCHEDULES = (
    "sequential", "gpipe", "1f1b", "interleaved chunks=2", "breadth-first chunks=2", "zb-h1", "zb-h2", "zb-v", "chimera", "gems-master",
)  # fmt: skip

TARGETS = (
    Target("small stages", 1.3, lambda r: r.case.startswith("gpt:")),
    Target("large stages", 1.1, lambda r: r.case.startswith("gpt-10m")),
)

INTRO = """Ratios are the peer's time over shardwise's (more than 1: shardwise is faster), by round, then their median. Each pair is
started together
and takes turns, with the same model, batches, microbatches, threads, allocator settings and AdamW. "loss differs" is the largest
relative difference of the two loss curves from the same weights: the gradients are equal where it is rounding."""


def contenders(case: Case, ours: str, theirs: str, chunks: int) -> tuple[Contender, Contender]:
    """shardwise and its peer under one schedule."""
    several = " chunks=2" if ours == "interleaved" else ""
    layout = f"pipeline=2 microbatches={case.microbatches} threads=1 schedule={ours}{several}"
    peer = Contender(f"torch {theirs}", "bench.peers.pipelining", options={"schedule": theirs, "chunks": chunks})
    return shardwise(f"shardwise {ours}", layout), peer


def overhead_table(found: Sequence[Overhead]) -> Table:
    """What the executor adds."""
    table = Table(title=f"Python beside the compute, at most {MOST_US:.0f} microseconds an action", title_justify="left")
    for name in ("layout", "actions a step", "whole, us", "compute, us", "beside, us"):
        table.add_column(name, justify="left" if name == "layout" else "right")
    for o in found:
        style = "green" if o.overhead_us <= MOST_US else "red"
        table.add_row(o.schedule, f"{o.actions}", f"{o.whole_s * 1e6:.0f}", f"{o.compute_s * 1e6:.0f}", f"[{style}]{o.overhead_us:.0f}[/]")
    return table


def beside_table(found: Sequence[Beside]) -> Table:
    """Measured steps beside simulated ones."""
    table = Table(title="A measured step beside the simulated one", title_justify="left")
    for name in ("layout", "measured, ms", "simulated, ms", "longer by", "farthest action"):
        table.add_column(name, justify="left" if name in ("layout", "farthest action") else "right")
    for b in found:
        style = "green" if abs(b.difference) <= 0.1 else "red"
        farthest = f"{b.farthest}, {b.farthest_share:+.1%}"
        shown = (b.schedule, f"{b.measured_s * 1e3:.1f}", f"{b.simulated_s * 1e3:.1f}", f"[{style}]{b.difference:+.1%}[/]", farthest)
        table.add_row(*shown)
    return table


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench pipeline", description="pipelines beside torch's", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, rows, targets, overhead and timelines to FILE")
    p.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    p.add_argument("--schedules", nargs="+", choices=[ours for ours, _, _ in PAIRS], default=[ours for ours, _, _ in PAIRS])
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--steps", type=int, default=4, help="steps of each contender in a round")
    p.add_argument("--quick", action="store_true", help="small stages, three rounds of two steps; does not write the page")
    given = p.parse_args(list(arguments))
    effort = Effort(3, 2, 2) if given.quick else Effort(given.rounds, given.steps)
    console = terminal()
    about = header(
        command("pipeline", arguments),
        versions(("torch",)),
        load=load(),
        measured=f"{effort.rounds} rounds of {effort.steps} steps after {effort.warm}, interleaved; medians of ratios by round",
    )
    rows: list[Row] = []
    series: dict[str, list[Series]] = {}
    skipped: dict[str, str] = {}
    for name in ["small"] if given.quick else given.cases:
        case = CASES[name]
        for ours, theirs, chunks in PAIRS:
            if ours not in given.schedules:
                continue
            console.print(f"[bold]{name} stages, {ours}[/]: {effort.rounds} rounds of {effort.steps} steps")
            pair = contenders(case, ours, theirs, chunks)
            found, left = measure(case, pair, effort, lambda text: console.print(text, highlight=False, markup=False))
            skipped |= {f"{who} ({name})": reason for who, reason in left.items()}
            series.setdefault(f"{name} stages", []).extend(found.values())
            if len(found) == 2:
                rows.append(row(case.label, "pipeline", found[pair[0].name], found[pair[1].name]))
    spent = [overhead(1), overhead(2)]
    end = f"pipeline=2 microbatches={LARGE.microbatches}"
    steps = [beside(LARGE, f"{end} schedule={schedule}") for schedule in (() if given.quick else SCHEDULES)]
    verdicts = judge(TARGETS, rows, skipped)
    show(console, rows, verdicts, skipped)
    tables = [overhead_table(spent), *([beside_table(steps)] if steps else [])]
    for table in tables:
        console.print(table)
    if given.json:
        more = {
            "overhead": [asdict(o) | {"overhead_us": o.overhead_us} for o in spent],
            "timelines": [asdict(b) | {"difference": b.difference} for b in steps],
        }
        given.json.write_text(json.dumps(as_json(about, rows, verdicts, skipped) | more, indent=1) + "\n")
    if not given.quick:
        text = markdown(about, rows, verdicts, skipped, series, INTRO, "pipelines beside torch.distributed.pipelining")
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text("\n".join([text, *(line for table in tables for line in lines_of(table))]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    problems = wrong(rows, skipped)
    for problem in problems:
        print(f"shardwise: {problem}", file=sys.stderr)
    return 4 if problems else 0
