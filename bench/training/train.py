"""`scripts/bench train`: shardwise beside its peers on the same GPT, in one run.

Out: rows and verdicts in the terminal, `--json FILE`, and docs/benchmarks/train.md. Exit status 0 also where a target is missed: a
measurement that says so is a good one. 4 where shardwise itself does not run or computes another loss than its peers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from bench.common import arithmetic
from bench.common import contenders as who
from bench.common.arithmetic import Row, Series, Target, as_json, judge, row
from bench.common.case import Case, Contender
from bench.common.contenders import Set
from bench.common.document import command, header, load, markdown, show, terminal, versions
from bench.common.measure import Effort, measure
from bench.common.processes import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "train.md"
PACKAGES = ("torch", "accelerate", "lightning-fabric", "deepspeed", "megatron-core", "axonn")

MODELS = {
    "gpt-10m": Case("gpt-10m", batch=8, sequence=256, microbatches=4),
    "gpt-50m": Case("gpt-50m", batch=8, sequence=256, microbatches=4, together=4),
}

SETS = ("data", "exchange", "pipeline", "tensor", "chosen", "settings")
TARGETS = (
    Target("data parallel, beside DDP", 1.0, lambda r: r.kind == "data" and r.peer_name == who.DDP.name),
    Target("data parallel, beside itself without exchange", 1 / 1.02, lambda r: r.kind == "exchange" and r.peer_name == who.ALONE),
    Target("data parallel, beside DDP over gloo", 1.05, lambda r: r.kind == "exchange" and r.peer_name == who.DDP.name),
    Target("ZeRO-1, beside ZeroRedundancyOptimizer", 1.1, lambda r: r.kind == "exchange" and r.peer_name == who.ZERO_OPTIMIZER.name),
    Target("pipeline, beside torch GPipe", 1.1, lambda r: is_pipeline(r, who.GPIPE.name, own=False)),
    Target("pipeline, beside torch 1F1B", 1.1, lambda r: is_pipeline(r, who.ONE_F_ONE_B.name, own=False)),
    Target("pipeline in zb-v, beside torch 1F1B", 1.1, lambda r: is_pipeline(r, who.ONE_F_ONE_B.name, own=True)),
    Target("tensor, beside DTensor", 1.1, lambda r: r.kind == "tensor" and r.peer_name in (who.DTENSOR.name, who.DTENSOR_VOCABULARY.name)),
    Target("tensor, beside Megatron-Core", 1.0, lambda r: r.kind == "tensor" and r.peer_name == who.MEGATRON.name),
    Target("own plan in float32, beside the best in float32", 1.0, lambda r: is_best(r, who.CHOSEN_FLOAT32, "float32")),
    Target("own plan, beside the best in float32", 1.0, lambda r: is_best(r, who.CHOSEN, "float32")),
    Target("own plan, beside the best in its precision", 1.0, lambda r: is_best(r, who.CHOSEN, "its precision")),
    Target("own plan, beside DDP as users write it", 1.8, lambda r: r.kind == "settings" and r.peer_name == who.DDP_WRITTEN.name),
)

INTRO = """Ratios are the peer's time over shardwise's (more than 1: shardwise is faster), by round, then their median. All contenders of
a set are
started together and take turns; while one runs, the others wait in a blocked read. Settings `equal`: the same threads a rank, the same
allocator settings of the C library, float32 products by the same library, the same optimizer (AdamW, fused where the peer takes it),
float32, the same batches and microbatches; `own`: everything as the contender sets it by itself. "loss differs" is the largest relative
difference of the two loss curves, from the same initial weights and data."""


def is_pipeline(r: Row, peer_name: str, own: bool) -> bool:
    """Whether a row compares pipelines: in the peer's schedule, or with `own` in one that shardwise has for the same memory."""
    return r.kind == "pipeline" and r.peer_name == peer_name and (r.shardwise_name == who.BEST_SCHEDULE) is own


def is_best(r: Row, shardwise_name: str, precision: str) -> bool:
    """Whether a row compares one of shardwise's own plans with the fastest of all peers in a precision."""
    return r.shardwise_name == shardwise_name and r.case.endswith(f", best of all in {precision}")


@dataclass
class Found:
    """What a run has gathered so far."""

    rows: list[Row] = field(default_factory=list)
    series: dict[str, list[Series]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def rows_of(case: Case, group: Set, series: Mapping[str, Series]) -> list[Row]:
    """A row for every pair of a set that ran."""
    return [row(case.label, group.kind, series[a], series[b]) for a, b in group.pairs if a in series and b in series]


def best_rows(case: Case, rows: Sequence[Row]) -> list[Row]:
    """shardwise's own plans beside the peer that does best against them, in float32 and in the plan's own precision."""
    out = []
    for ours, words in ((who.CHOSEN_FLOAT32, "float32"), (who.CHOSEN, "float32"), (who.CHOSEN, "its precision")):
        mine = [r for r in rows if r.kind == "chosen" and r.shardwise_name == ours]
        found = [r for r in mine if (r.peer_precision == "float32" if words == "float32" else r.peer_precision == r.precision)]
        if found:
            out.append(replace(min(found, key=lambda r: r.ratio), case=f"{case.label}, best of all in {words}"))
    return out


def fastest(found: Found, model: str, count: int) -> tuple[Contender, ...]:
    """The peers that were fastest in the earlier sets, by their distance to shardwise's contender that both ran beside."""
    peers = {c.name: c for s in (who.data_set(), who.pipeline_set(MODELS[model]), who.tensor_set()) for c in s.contenders}
    seconds = {r.peer_name: r.peer for r in found.rows if r.case.startswith(model) and r.peer_name in peers and r.kind != "chosen"}
    return tuple(peers[name] for name in sorted(seconds, key=lambda n: seconds[n])[:count])


def set_of(kind: str, work: Case, found: Found) -> Set:
    """The contenders of a kind; beside shardwise's own plan, the three fastest peers of the sets before."""
    match kind:
        case "data":
            return who.data_set()
        case "pipeline":
            return who.pipeline_set(work)
        case "tensor":
            return who.tensor_set()
        case "exchange":
            return who.exchange_set()
        case "settings":
            return who.settings_set()
        case _:
            return who.chosen_set(fastest(found, work.model, 3))


def run(models: Sequence[str], kinds: Sequence[str], effort: Effort, console: Console, profile: str) -> Found:
    """Measure set after set."""
    found = Found()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for model in models:
        case = MODELS[model]
        for kind in kinds:
            group = set_of(kind, case, found)
            title = f"{case.label}, {kind}"
            rows: list[Row] = []
            for part in who.parts(group, case.together):
                console.print(f"[bold]{title}[/]: {len(part.contenders)} contenders, {effort.rounds} rounds of {effort.steps} steps")
                series, skipped = measure(case, part.contenders, effort, say, profile)
                found.series.setdefault(title, []).extend(series.values())
                found.skipped |= {f"{name} ({model})": reason for name, reason in skipped.items()}
                rows += rows_of(case, part, series)
            found.rows += rows + best_rows(case, rows)
    return found


def wrong(found: Found) -> list[str]:
    """What must not be: shardwise that does not run, or float32 loss curves that part."""
    alone = (who.ALONE, who.DDP_ALONE.name)  # every rank trains a model of its own
    same = [r for r in found.rows if r.precision == r.peer_precision == "float32" and r.peer_name not in alone]
    return arithmetic.wrong(same, found.skipped)


def install_peers() -> None:
    """Make .venv-peers: the peers' pinned packages on top of this environment, which stays as it is."""
    folder = ROOT / ".venv-peers"
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    here = next(p for p in sys.path if p.endswith("site-packages"))
    there = next(folder.glob("lib/python*/site-packages"))
    (there / "_environment.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-build-isolation"]
    for line in (Path(__file__).parents[1] / "peers" / "requirements.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            print(f"shardwise: installing {line} into .venv-peers", flush=True)
            done = subprocess.run([*pip, line], capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"shardwise: {line} does not install, its rows will be skipped: {done.stderr.strip().splitlines()[-1]}", flush=True)


def page_of(models: Sequence[str]) -> Path:
    """Where the results go: the larger model by itself has a page of its own, so that it can be measured when there is time.

    >>> page_of(["gpt-10m", "gpt-50m"]).name, page_of(["gpt-50m"]).name
    ('train.md', 'train-gpt-50m.md')
    """
    return PAGE if next(iter(MODELS)) in models else PAGE.with_name(f"train-{models[0]}.md")


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench train", description="shardwise beside its peers on the same GPT", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, rows and targets to FILE")
    p.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    p.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=2, help="steps of each contender in a round")
    p.add_argument("--quick", action="store_true", help="gpt-10m, three rounds of one step; does not write the page")
    p.add_argument("--profile", metavar="FOLDER", default="", help="trace one more step of every contender into FOLDER")
    p.add_argument("--install-peers", action="store_true", help="first install the peers that are not PyTorch's own into .venv-peers")
    given = p.parse_args(list(arguments))
    if given.install_peers:
        install_peers()
    effort = Effort(3, 1, 2) if given.quick else Effort(given.rounds, given.steps)
    models = ["gpt-10m"] if given.quick else given.models
    if given.profile:
        Path(given.profile).mkdir(parents=True, exist_ok=True)
    console = terminal()
    about = header(
        command("train", arguments),
        versions(PACKAGES),
        load=load(),
        measured=f"{effort.rounds} rounds of {effort.steps} steps after {effort.warm}, interleaved; medians of ratios by round",
    )
    found = run(models, given.sets, effort, console, str(Path(given.profile).resolve()) if given.profile else "")
    verdicts = judge(TARGETS, found.rows, found.skipped)
    show(console, found.rows, verdicts, found.skipped)
    if given.json:
        given.json.write_text(json.dumps(as_json(about, found.rows, verdicts, found.skipped), indent=1) + "\n")
    if not given.quick:
        page = page_of(models)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(markdown(about, found.rows, verdicts, found.skipped, found.series, INTRO))
        console.print(f"wrote {page.relative_to(ROOT)}")
    problems = wrong(found)
    for problem in problems:
        print(f"shardwise: {problem}", file=sys.stderr)
    return 4 if problems else 0
