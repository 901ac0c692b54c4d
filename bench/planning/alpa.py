"""`scripts/bench alpa`: the 21 configurations of Alpa's evaluation, planned and priced. Out: docs/alpa.md, `--json FILE`.

Three plans a configuration, all priced by the same simulator: shardwise's own; the best point of the grid that the paper's baselines search
(Megatron-LM for GPT, DeepSpeed for mixtures of experts, pipelines of data parallelism for Wide-ResNet); and Alpa's own solution as its
repository publishes it. Nothing is measured here. Alpa's stages are on submeshes as published, of unequal sizes too, and where its solution
leaves the cut to its integer programme, the best cut counts as Alpa's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from bench.common.processes import ROOT
from shardwise.cli.pricing_context import PricedVariant, PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.resize import resize_cluster
from shardwise.errors import ShardwiseError
from shardwise.plan.layout import Layout

PAGE = ROOT / "docs" / "alpa.md"
KEPT = ROOT / "docs" / "benchmarks" / "data" / "alpa.json"
MACHINE = "p3.16xlarge"


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration: the zoo's model on `num_devices` V100, and Alpa's published solution."""

    family: str
    model: str
    num_devices: int
    batch: int
    precision: str
    stages: int  # of Alpa's solution
    microbatches: int
    tensor: int = 0  # inside a stage; 0: what its integer programme finds best
    exact: bool = True  # whether it is as published
    inner: tuple[str, ...] = ()  # of stages on unequal submeshes how each is arranged, one of these

    @property
    def key(self) -> str:
        return f"{self.model} on {self.num_devices}"


def _gpt(model: str, n: int, stages: int, microbatches: int, tensor: int, inner: tuple[str, ...] = ()) -> Case:
    return Case("gpt", f"gpt-{model}:sequence=1024", n, 1024, "float16", stages, microbatches, tensor, inner=inner)


def _moe(model: str, n: int, stages: int, microbatches: int) -> Case:
    return Case("moe", f"moe-{model}", n, 1024, "float16", stages, microbatches, 1)


def _wide(model: str, n: int, stages: int, microbatches: int, exact: bool = True, inner: tuple[str, ...] = ()) -> Case:
    return Case("wide-resnet", f"wide-resnet-{model}", n, 1536, "float32", stages, microbatches, 0, exact, inner)


# Models: Zheng et al., OSDI 2022, section 8 and its tables. Solutions: alpa-projects/alpa, benchmark/alpa/suite_auto_gpt.py,
# suite_auto_moe.py and suite_wresnet.py, "search solutions found for p3.16xlarge".
CASES = (
    _gpt("350m", 1, 1, 512, 1), _gpt("760m", 2, 2, 128, 1), _gpt("1.3b", 4, 2, 128, 1), _gpt("2.6b", 8, 3, 128, 1, ("2x1/2x1/4x1",)),
    _gpt("6.7b", 16, 2, 64, 4), _gpt("15b", 32, 4, 128, 4), _gpt("39b", 64, 16, 1024, 4),
    _moe("380m", 1, 1, 512), _moe("690m", 2, 1, 32), _moe("1.3b", 4, 2, 32), _moe("2.4b", 8, 2, 32), _moe("10b", 16, 2, 16),
    _moe("27b", 32, 8, 128), _moe("70b", 64, 8, 64),
    _wide("250m", 1, 1, 24), _wide("500m", 2, 1, 24), _wide("1b", 4, 1, 24), _wide("2b", 8, 2, 24), 
    _wide("4b", 16, 3, 32, inner=("4x1/4x1/8x1", "4x1/4x1/4x2", "4x1/4x1/2x4", "4x1/4x1/1x8")),
    _wide("6.8b", 32, 4, 32), _wide("13b", 64, 8, 32, exact=False),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan of one kind: its layout and samples a second; empty where none fits."""

    layout: str = ""
    samples_per_s: float = 0.0
    mfu: float = 0.0
    tried: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the page."""

    case: str
    family: str
    num_devices: int
    shardwise: Found
    grid: Found
    alpa: Found
    exact: bool
    planning_s: float


def powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def grid(case: Case) -> Iterator[Layout]:
    """What the paper's baseline for a family searches: sizes of its axes and microbatches; recomputed or not, whichever is better."""
    n = case.num_devices
    for tensor in powers(min(8, n)) if case.family != "wide-resnet" else [1]:
        for pipeline in powers(n // tensor) if case.family != "moe" else [1]:
            data = n // tensor // pipeline
            for rows in (1, 2, 4, 8, 16, 32):
                if case.batch % (data * rows):
                    continue
                microbatches = case.batch // (data * rows)
                if pipeline > 1 and microbatches < pipeline:
                    continue
                for recompute in ("full", "none"):
                    # Megatron-LM of the time has no ZeRO beside pipelines; DeepSpeed's mixtures have stages 1 and 2.
                    for zero in (1, 2) if case.family == "moe" and data > 1 else (0,):
                        common = Layout(
                            data, tensor, pipeline, microbatches, "1f1b", zero, recompute, case.precision,
                            expert=expert_ways(case, data) if case.family == "moe" else 1,
                        )  # fmt: skip
                        yield common


def alpas(case: Case) -> Iterator[Layout]:
    """Alpa's solution, with every cut that it leaves open; it recomputes layers and scatters optimizer state."""
    for inner in case.inner:
        yield from (
            Layout(
                pipeline=case.stages, microbatches=case.microbatches, zero=zero, recompute="full", precision=case.precision, inner=inner
            ) for zero in (0, 2)
        )  # fmt: skip
    if case.inner:
        return
    each = case.num_devices // case.stages
    for tensor in [case.tensor] if case.tensor else powers(each):
        data = each // tensor
        if case.batch % (data * case.microbatches):
            continue
        for expert in {1, expert_ways(case, data)}:
            for zero in (0, 2) if data > 1 else (0,):
                yield Layout(data, tensor, case.stages, case.microbatches, "1f1b", zero, "full", case.precision, expert=expert)


def expert_ways(case: Case, data: int) -> int:
    """Replicas among which experts are spread: as many as divide both."""
    from math import gcd

    from shardwise.zoo.names import find

    return gcd(data, find(case.model)[1].experts) if case.family == "moe" else 1


def best(setting: PricingContext, layouts: Iterator[Layout], ran: bool = False) -> Found:
    """The fastest of these that fits; where none does and it is known that one `ran`, the fastest all the same, and a note."""
    found: PricedVariant | None = None
    other: PricedVariant | None = None
    tried, why = 0, ""
    for layout in layouts:
        tried += 1
        try:
            variant = setting.price(layout)
        except ShardwiseError as error:
            why = str(error).partition(";")[0]
            continue
        if variant.prediction is None or not variant.fits:
            why = variant.note
            if variant.prediction is not None and (other is None or _step_s(variant) < _step_s(other)):
                other = variant
            continue
        if found is None or _step_s(variant) < _step_s(found):
            found = variant
    chosen = found or (other if ran else None)
    if chosen is None or chosen.prediction is None:
        return Found(tried=tried, note=why)
    p = chosen.prediction
    return Found(str(chosen.layout), setting.batch_size / p.step_time_s, p.mfu, tried, "" if found else chosen.note)


def _step_s(variant: PricedVariant) -> float:
    return variant.prediction.step_time_s if variant.prediction is not None else float("inf")


def plan(setting: PricingContext, case: Case) -> Found:
    """shardwise's own plan."""
    try:
        chosen = setting.plan([f"precision={case.precision}"])
    except ShardwiseError as error:
        return Found(note=str(error).partition(";")[0])
    p = chosen.prediction
    return (
        Found(str(chosen.layout), setting.batch_size / p.step_time_s, p.mfu, len(chosen.candidates)) if p else Found(note=chosen.uncaptured)
    )


def run(case: Case) -> Result:
    """Plan and price one configuration."""
    machines = resize_cluster(Cluster.parse(MACHINE), case.num_devices)
    setting = PricingContext(case.model, machines, case.batch)
    began = time.perf_counter()
    ours = plan(setting, case)
    took = time.perf_counter() - began
    return Result(
        case.key, case.family, case.num_devices, ours, best(setting, grid(case)), best(setting, alpas(case), ran=True), case.exact, took
    )


NAMES = {"gpt": ("GPT", "Megatron-LM's grid"), "moe": ("GShard MoE", "DeepSpeed's grid"), "wide-resnet": ("Wide-ResNet", "PP-DP grid")}

INTRO = f"""The evaluation of Alpa (Zheng et al., OSDI 2022, section 8) has 21 configurations on up to 8 {MACHINE}.
shardwise plans each of them here, and the same simulator prices three plans: shardwise's, the best point of the grid that the paper's
baseline
searches, and Alpa's own solution, as its repository publishes it. These are predictions on a model of the machines, not measurements;
they show whether shardwise's search finds what the others found. A ratio above 1: shardwise's plan is faster.
`scripts/bench alpa` makes this page, in a quarter of an hour; a run over some families keeps the others' rows as they are.

What differs from the paper: Wide-ResNet 13B had a batch of 1,520, and here it has 1,536 and fewer microbatches (marked ~). Stages begin
where shardwise balances them. Where a solution leaves the sharding inside a stage to Alpa's integer programme, the best one is taken as
Alpa's.
A solution that does not fit 16 GB by shardwise's count of bytes, but that Alpa ran, is priced all the same (marked *): shardwise keeps
float32
weights and recomputes whole stages, where Alpa recomputes layer by layer."""


def markdown(results: Sequence[Result]) -> str:
    """The page."""
    lines = ["# Alpa's 21 configurations", "", INTRO, ""]
    for family, (title, baseline) in NAMES.items():
        mine = [r for r in results if r.family == family]
        if not mine:
            continue
        lines += [
            f"## {title}",
            "",
            f"| model | GPUs | shardwise, samples/s | against {baseline} | against Alpa's plan | shardwise's plan | Alpa's plan |",
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        for r in mine:
            cells = [r.case.partition(" on ")[0], str(r.num_devices), _speed(r.shardwise), _ratio(r.shardwise, r.grid), _near(r)]
            lines.append(f"| {' | '.join([*cells, r.shardwise.layout or r.shardwise.note, r.alpa.layout or r.alpa.note])} |")
        lines.append("")
    return "\n".join([*lines, *conclusion(results), ""])


def summary(results: Sequence[Result]) -> str:
    """How many times as fast shardwise's plans are, in one table, and in how many they are the fastest."""
    lines = ["| model | GPUs | against the baseline's grid | against Alpa's plan |", "|---|---|---|---|"]
    lines += [f"| {r.case.partition(' on ')[0]} | {r.num_devices} | {_ratio(r.shardwise, r.grid)} | {_near(r)} |" for r in results]
    return "\n".join([*lines, "", *conclusion(results), ""])


def conclusion(results: Sequence[Result]) -> list[str]:
    """In how many configurations shardwise's plan is the fastest, and which others there are."""
    lines = []
    done = [r for r in results if r.shardwise.samples_per_s]
    beaten = [r for r in done if r.shardwise.samples_per_s >= 0.995 * max(r.grid.samples_per_s, r.alpa.samples_per_s)]
    lines += [
        f"shardwise's plan is at least as fast as both others in {len(beaten)} of {len(results)} configurations (within half a per cent)."
    ]
    slower = [r.case for r in results if r not in beaten]
    if slower:
        lines.append(f"It is not in: {', '.join(slower)}.")
    missing = [case.key for case in CASES if case.key not in {r.case for r in results}]
    if missing:
        lines.append(f"Not priced yet: {', '.join(missing)}.")
    return lines


def _near(r: Result) -> str:
    return ("" if r.exact else "~") + ("*" if r.alpa.note and r.alpa.samples_per_s else "") + _ratio(r.shardwise, r.alpa)


def _speed(found: Found) -> str:
    return f"{found.samples_per_s:,.1f}" if found.samples_per_s else "does not fit"


def _ratio(ours: Found, theirs: Found) -> str:
    if not theirs.samples_per_s:
        return "that does not fit"
    return f"{ours.samples_per_s / theirs.samples_per_s:.2f}x" if ours.samples_per_s else "0"


def load() -> dict[str, Result]:
    """What earlier runs have found, by case."""
    if not KEPT.exists():
        return {}
    rows = json.loads(KEPT.read_text())
    return {r["case"]: Result(**{**r, **{key: Found(**r[key]) for key in ("shardwise", "grid", "alpa")}}) for r in rows}


def main(arguments: Sequence[str]) -> int:
    """Read the options, plan and price, write the page; a run over some families keeps the others' rows."""
    p = argparse.ArgumentParser(prog="scripts/bench alpa", description="Alpa's 21 configurations", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write rows to FILE")
    p.add_argument("--families", nargs="+", choices=NAMES, default=list(NAMES))
    p.add_argument("--most", type=int, default=64, metavar="N", help="configurations of at most N devices")
    p.add_argument("--least", type=int, default=1, metavar="N", help="configurations of at least N devices")
    given = p.parse_args(list(arguments))
    console = Console(soft_wrap=True)
    known = load()
    for case in CASES:
        if case.family not in given.families or not given.least <= case.num_devices <= given.most:
            continue
        r = known[case.key] = run(case)
        both = f"{_ratio(r.shardwise, r.grid)} the grid's, {_ratio(r.shardwise, r.alpa)} Alpa's"
        console.print(f"{r.case}: {_speed(r.shardwise)} samples/s, {both}; planned in {r.planning_s:.1f} s", markup=False)
        rows = [known[c.key] for c in CASES if c.key in known]
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        KEPT.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
        PAGE.write_text(markdown(rows))
    if given.json:
        shardwise = [asdict(r) for r in known.values()]
        interface = [
            {"case": r["case"], "shardwise": r["shardwise"]["samples_per_s"], "peer": r[key]["samples_per_s"] or None, "peer_name": name,
             "ratio": r["shardwise"]["samples_per_s"] / r[key]["samples_per_s"] if r[key]["samples_per_s"] else None, "unit": "samples/s"}
            for r in shardwise for key, name in (("grid", NAMES[r["family"]][1]), ("alpa", "Alpa's published plan"))
        ]  # fmt: skip
        given.json.write_text(json.dumps({"rows": interface}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
