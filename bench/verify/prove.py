"""`scripts/bench prove`: how long proofs take, by layers, ranks and axes, and for plans of large models.

Each proof is a process of its own. Out: seconds of CPU and of the clock, in the terminal, in
`--json FILE` and in docs/benchmarks/prove.md. Not measured: memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.processes import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "prove.md"
DEEPSEEK = f"hf:{Path('bench/verify/deepseek_v3.json')}"
TIMEOUT_S = 300
GPT = "gpt:layers={},hidden=8,heads=4,sequence=8,vocabulary=16"
CASES = {
    "large plans": [
        ("llama-405b", "data=128 tensor=8 pipeline=16 microbatches=16 zero=1"),
        ("moe-70b", "data=16 expert=16 tensor=2 pipeline=2 microbatches=4 zero=1"),
        ("moe-70b", "data=64 expert=32 tensor=2 pipeline=4 microbatches=8 zero=1"),
        ("unet:image=4096", "data=4 spatial=4x4 recompute=full"),
        (DEEPSEEK, "data=128 expert=64 pipeline=16 microbatches=32 zero=1"),
    ],
    "by layers": [(GPT.format(n), "data=2 tensor=2") for n in (1, 4)],
    "by ranks": [(GPT.format(1), f"data={n}") for n in (2, 8)],
    "by axes": [(GPT.format(1), layout) for layout in ("tensor=2", "context=2 attention=ring", "pipeline=2 microbatches=2")],
}  # fmt: skip
INTRO = """Each proof at the default probability of at most 1e-12. `CPU s`, `clock s`: of a whole process, of which the start of Python and
torch, capture and reduction are most; `load`: processes that ran or waited when it began, on the cores named above.
Plans of more than 16 ranks, and zoo models of more than 2^20 parameters, are reduced ([proofs](../proofs.md)). DeepSeek-V3 is a model of
transformers, whose sizes `prove` keeps: `bench/verify/deepseek_v3.json` has the operators of its public configuration (latent attention,
groups of experts, a shared expert, dense first layers) with sizes that were reduced by hand."""
_PROGRAM = """import json, sys, time
import shardwise
row = {}
try:
    proof = shardwise.prove(sys.argv[1], sys.argv[2], 16 if sys.argv[1].startswith("hf:") else None)
    row = {"outcome": proof.outcome, "points": proof.points, "proven": proof.layout}
except shardwise.errors.ShardwiseError as error:
    row = {"outcome": f"{type(error).__name__}: {error}", "points": 0, "proven": ""}
row["cpu_s"] = time.process_time()
print(json.dumps(row))
"""


@dataclass(frozen=True, slots=True)
class TimedProof:
    """A proof and its times; `outcome` names what ended it where it is not equal."""

    group: str
    model: str
    layout: str
    outcome: str
    points: int = 0
    proven: str = ""
    cpu_s: float = 0.0
    clock_s: float = 0.0
    load: float = 0.0


def time_proof(group: str, model: str, layout: str) -> TimedProof:
    """Prove a layout in a process of its own."""
    busy, began = os.getloadavg()[0], time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, model, layout], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return TimedProof(group, model, layout, f"not ended after {TIMEOUT_S} s", load=busy)
    if done.returncode:
        return TimedProof(group, model, layout, f"failed: {done.stderr.strip().splitlines()[-1][:200]}", load=busy)
    row = json.loads(done.stdout.splitlines()[-1])
    return TimedProof(group, model, layout, clock_s=time.perf_counter() - began, load=busy, **row)


def build_table(proofs: Sequence[TimedProof]) -> Table:
    """Build the table, one row a proof."""
    out = Table(title="Proofs", title_justify="left")
    for name in ("group", "model", "layout", "proven in its place", "points", "CPU s", "clock s", "load", "outcome"):
        out.add_column(name, justify="right" if name == "points" or name.endswith((" s", "load")) else "left")
    for p in proofs:
        times = [f"{value:.1f}" for value in (p.cpu_s, p.clock_s, p.load)]
        out.add_row(p.group, p.model, p.layout, p.proven, str(p.points), *times, p.outcome.partition(" (a wrong")[0])
    return out


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, write the page; exit 1 if a proof is not equal."""
    p = argparse.ArgumentParser(prog="scripts/bench prove", description="how long proofs take", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and rows to FILE")
    p.add_argument("--groups", nargs="+", choices=list(CASES), default=list(CASES), help="what to measure; the page has all of them")
    p.add_argument("--quick", action="store_true", help="the first case of each group; does not write the page")
    given = p.parse_args(list(arguments))
    about = header(command("prove", arguments), versions(("torch",)), load=load(), measured="each proof once, one thread")
    console = terminal()
    proofs = list[TimedProof]()
    for group in given.groups:
        for model, layout in CASES[group][:1] if given.quick else CASES[group]:
            proofs.append(time_proof(group, model, layout))
            console.print(proofs[-1])
    made = build_table(proofs)
    console.print(made)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": [asdict(proof) for proof in proofs]}, indent=1) + "\n")
    if not given.quick and given.groups == list(CASES):
        PAGE.write_text("\n".join([*opening("proofs", about, INTRO), *lines_of(made)]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0 if all(proof.outcome.startswith("equal") for proof in proofs) else 1
