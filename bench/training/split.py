"""`scripts/bench split`: every kind of splitting that runs: bytes counted against its formula, seconds beside the nearest library.

Out: rows in the terminal, `--json FILE`, and docs/benchmarks/split.md. Exit status 0 also where a target is missed; 4 where shardwise
    does not
run, computes another loss than its peer, or sends other bytes than the formula says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from bench.common import arithmetic
from bench.common.arithmetic import Row, Series, Target, as_json, judge, row
from bench.common.case import Case, Contender
from bench.common.contenders import shardwise
from bench.common.document import command, header, lines_of, load, markdown, show, terminal, versions
from bench.common.measure import Effort, measure
from bench.common.processes import ROOT
from bench.training.split_bytes import counted
from bench.training.split_formulas import FORMULAS

PAGE = ROOT / "docs" / "benchmarks" / "split.md"
NEAR = 0.01  # part by which bytes may differ from the formula: norms' gradients and rows of losses, which formulas leave out
TEXT = Case("gpt:layers=4,hidden=512,heads=8,sequence=128,vocabulary=512", batch=8, sequence=128, microbatches=4)
# With fewer words than tokens shardwise gathers the embedding's weight, which is less than the formula of Megatron-LM.
WORDS = Case(TEXT.model.replace("vocabulary=512", "vocabulary=2048"), batch=8, sequence=128, microbatches=4)
# At a rate of 1e-4 norms over one image make 1e-3 of the loss, after 17 steps, of 1e-7 in the weights; at 1e-5 4e-6.
IMAGES = Case("resnet-18:image=160,classes=16", batch=1, sequence=3 * 160 * 160, microbatches=1, lr=1e-5)
MIXED = Case("moe:layers=4,hidden=128,heads=4,sequence=64,vocabulary=256,experts=4,capacity=2", batch=8, sequence=64, microbatches=1)
CHAIN = Case(f"{Path(__file__).with_name('split_models.py')}:chain", batch=512, microbatches=1)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way of splitting: `layout` of `case`, `ranks` of them, beside `peer`; None where `why` says why not. `only`: the operation whose
    bytes the formula is of, all by default."""

    name: str
    case: Case
    layout: str
    peer: Contender | None = None
    ranks: int = 2
    why: str = ""
    only: str = ""


def _peer(name: str, module: str, **options: object) -> Contender:
    return Contender(name, f"bench.peers.{module}", options=dict(options))


CONTEXT = "four ranks on two cores, and torch's and other libraries' context parallelism is for GPUs: bytes alone"
KINDS = (
    Kind("data", TEXT, "data=2", _peer("DDP", "ddp")),
    Kind("zero=1", TEXT, "data=2 zero=1", _peer("ZeroRedundancyOptimizer", "ddp", zero=True)),
    Kind("zero=2", TEXT, "data=2 zero=2", _peer("FSDP2, weights kept", "fsdp2", keep=True)),
    Kind("zero=3", TEXT, "data=2 zero=3", _peer("FSDP2", "fsdp2")),
    Kind("tensor", WORDS, "tensor=2", _peer("DTensor, vocabulary", "dtensor", vocabulary=True)),
    Kind("sequence", TEXT, "tensor=2 sequence_parallel=on", _peer("DTensor, sequence", "dtensor", vocabulary=True, sequence=True)),
    Kind("grid", CHAIN, "tensor=2x2", None, 4, "four ranks on two cores, and AxoNN's grids are for GPUs: bytes alone"),
    Kind("pipeline", TEXT, "pipeline=2 microbatches=4 schedule=1f1b", _peer("torch 1F1B", "pipelining", schedule="1F1B")),
    *(Kind(word, TEXT, f"context=4 attention={word}", None, 4, CONTEXT) for word in ("ring", "ulysses", "ulysses:2+ring", "gather")),
    Kind("spatial", IMAGES, "spatial=2", Contender("one process, two threads", "bench.peers.zoo", num_ranks=1, threads=2), only="exchange"),
    Kind("expert", MIXED, "data=2 expert=2", _peer("DDP, every expert on every rank", "zoo")),
)

TARGETS = tuple(Target(kind.name, 1.0, lambda r, name=kind.name: r.kind == name) for kind in KINDS if kind.peer is not None)  # type: ignore[misc]

INTRO = """Ratios are the peer's time over shardwise's (more than 1: shardwise is faster), by round, then their median. Each pair is
started together
and takes turns, with the same model, batches, microbatches, threads, allocator settings and AdamW. "loss differs" is the largest
relative difference of the two loss curves from the same weights. Of pieces of an image and of experts no library that runs on processors
has the same split, so the peer is what one would run without it: one process with both cores, and replicas that have all experts. Halves
of an image exchange borders and statistics in each of 20 layers, which two threads of one process need not: they are for images whose
activations one device does not hold."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """What the busiest rank sends in a step: counted, and by the formula."""

    kind: str
    case: str
    layout: str
    counted: float
    formula: float

    @property
    def difference(self) -> float:
        return self.counted / self.formula - 1


def bytes_of(kind: Kind) -> Bytes:
    """Count a step of one kind."""
    sent = counted(kind.case.model, kind.case.batch, f"{kind.layout} threads=1")
    total = sent[kind.only] if kind.only else sum(sent.values())
    return Bytes(kind.name, kind.case.label, kind.layout, total, FORMULAS[kind.name](kind.case, kind.ranks))


def bytes_table(found: Sequence[Bytes]) -> Table:
    """Bytes beside the formula."""
    table = Table(title=f"Bytes that a rank sends in a step, within {NEAR:.0%} of the formula", title_justify="left")
    for name in ("kind", "layout", "counted", "by the formula", "differs by"):
        table.add_column(name, justify="left" if name in ("kind", "layout") else "right")
    for b in found:
        style = "green" if abs(b.difference) <= NEAR else "red"
        table.add_row(b.kind, b.layout, f"{b.counted:,.0f}", f"{b.formula:,.0f}", f"[{style}]{b.difference:+.2%}[/]")
    return table


def wrong(rows: Sequence[Row], sent: Sequence[Bytes], skipped: dict[str, str]) -> list[str]:
    """What must not be: shardwise that does not run, loss curves that part, bytes that the formula does not say."""
    bytes_ = [f"{b.kind}: {b.counted:,.0f} bytes sent, {b.difference:+.1%} against the formula" for b in sent if abs(b.difference) > NEAR]
    return arithmetic.wrong(rows, skipped, lambda r: r.kind) + bytes_


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    what = "every kind of splitting beside the nearest library"
    p = argparse.ArgumentParser(prog="scripts/bench split", description=what, allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, rows, targets and bytes to FILE")
    p.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=[kind.name for kind in KINDS])
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=3, help="steps of each contender in a round")
    p.add_argument("--only-bytes", action="store_true", help="measure no time; does not write the page")
    given = p.parse_args(list(arguments))
    effort = Effort(given.rounds, given.steps)
    console = terminal()
    about = header(
        command("split", arguments),
        versions(("torch",)),
        load=load(),
        measured=f"{effort.rounds} rounds of {effort.steps} steps after {effort.warm}, interleaved; medians of ratios by round",
    )
    rows: list[Row] = []
    sent: list[Bytes] = []
    series: dict[str, list[Series]] = {}
    skipped: dict[str, str] = {}
    for kind in (kind for kind in KINDS if kind.name in given.kinds):
        console.print(f"[bold]{kind.name}[/]: {kind.layout}")
        sent.append(bytes_of(kind))
        if kind.peer is None:
            skipped[f"a peer for {kind.name}"] = kind.why
        elif not given.only_bytes:
            ours = shardwise(f"shardwise {kind.name}", f"{kind.layout} threads=1", kind.ranks)
            found, left = measure(kind.case, (ours, kind.peer), effort, lambda text: console.print(text, highlight=False, markup=False))
            skipped |= left
            series[kind.name] = list(found.values())
            rows += [row(kind.case.label, kind.name, found[ours.name], found[kind.peer.name])] if len(found) == 2 else []
    verdicts = judge(TARGETS, rows, skipped)
    show(console, rows, verdicts, skipped)
    table = bytes_table(sent)
    console.print(table)
    if given.json:
        more = {"bytes": [asdict(b) | {"difference": b.difference} for b in sent]}
        given.json.write_text(json.dumps(as_json(about, rows, verdicts, skipped) | more, indent=1) + "\n")
    if not given.only_bytes and len(given.kinds) == len(KINDS):
        text = markdown(about, rows, verdicts, skipped, series, INTRO, what)
        PAGE.write_text("\n".join([text, *lines_of(table)]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    problems = wrong(rows, sent, skipped)
    for problem in problems:
        print(f"shardwise: {problem}", file=sys.stderr)
    return 4 if problems else 0
