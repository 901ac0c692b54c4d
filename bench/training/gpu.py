"""`scripts/bench gpu`: models on one GPU, shardwise beside plain PyTorch, and what shardwise predicts for that card.

Out: seconds a step, memory, MFU against the measured rate of large matrix products, docs/benchmarks/data/gpu.json with all that was
    measured
and the card as it was probed, and docs/benchmarks/gpu.md. `--again FILE` measures nothing: it predicts what FILE measured with today's
code. Where torch sees no GPU it says so and ends with status 0.

Both sides: bfloat16 autocast over float32 weights, fused AdamW, the same batches, both compiled or neither; both live in one process and
take turns. MFU counts matrix products once (no recomputation), attention in full.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import shardwise
from bench.common.arithmetic import Series, Target, Verdict, judge, row
from bench.common.document import command, header, markdown, show, versions
from bench.common.measure import Effort, turn
from bench.common.processes import ROOT
from shardwise.capture.capture import call_with_loss
from shardwise.cluster.catalogue import catalogue_names, dump, parse_cluster
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.probe.measure import measure_here
from shardwise.cost.calibration.efficiency import chip_of
from shardwise.errors import OutOfMemory, ShardwiseError
from shardwise.plan.plan import Prediction
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
PEER = "PyTorch"
TARGETS = (Target(f"step, beside {PEER}", 1.0, lambda r: r.peer_name == PEER),)
MFU_GOAL = 0.60
MATRIX_UNITS = "bfloat16"
MOST_KERNELS = 40

INTRO = """One GPU. Ratios are PyTorch's time over shardwise's (more than 1: shardwise is faster). MFU is the model's FLOPs over the step
time and
the rate of large bfloat16 matrix products measured in the same run."""

PREDICTED = """## Predictions

`measured card`: by the rates of the card that `shardwise` measures itself before it plans for it. `catalogue`: by the card's name
alone, eager as `1xhgx-h200@eager` has it. `kernels` is how long kernels run in a step; where that is much less than the step, the
host that launches them is what takes the time. Of memory, the allocator's peak and what is predicted without its margin."""


@dataclass(frozen=True)
class Case:
    """A model, samples a step, and what a layout says more than bfloat16 on one rank."""

    model: str
    samples: int
    more: str = ""

    @property
    def layout(self) -> str:
        return f"data=1 precision={MATRIX_UNITS} {self.more}".strip()

    @property
    def is_compiled(self) -> bool:
        return "compile=on" in self.more

    @property
    def name(self) -> str:
        return f"{self.model}, {self.samples} samples{', compiled' if self.is_compiled else ''}"


CASES = (
    Case("gpt-1.3b", 8, "compile=on"), Case("resnet-50", 64), Case("bert-large", 16), Case("gpt-350m", 8), Case("vit-l", 32),
    Case("moe-380m", 8), Case("unet-31m", 4),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One case: seconds a step by round, losses by step, peak of the allocator, of both sides; of shardwise's step also its kernels."""

    model: str
    samples: int
    more: str
    flops: float
    seconds: tuple[float, ...]
    peer_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    peer_losses: tuple[float, ...]
    memory_bytes: int
    peer_memory_bytes: int
    busy_s: float = 0.0
    kernels: tuple[tuple[str, int, float], ...] = ()  # name, how often, seconds in all; those that take longest

    @property
    def case(self) -> Case:
        return Case(self.model, self.samples, self.more)

    @property
    def pair(self) -> tuple[Series, Series]:
        settings = "compiled" if self.case.is_compiled else "eager"
        ours = Series("shardwise", self.seconds, (), self.losses, self.memory_bytes, self.case.layout, MATRIX_UNITS, settings)
        return ours, Series(PEER, self.peer_seconds, (), self.peer_losses, self.peer_memory_bytes, "", MATRIX_UNITS, settings)


def reason_to_skip() -> str:
    """Why this cannot run here, or nothing."""
    if torch.cuda.device_count():
        return ""
    built = "this build of torch has no CUDA" if torch.version.cuda is None else "torch sees no GPU (nvidia-smi shows what the driver sees)"
    return f"{built}; run it on a machine with an NVIDIA GPU"


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_peak(device: torch.device, size: int = 8192, repeats: int = 30) -> float:
    """FLOP/s of square bfloat16 matrix products, the median of `repeats`."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(repeats + 3):
        wait(device)
        began = time.perf_counter()
        torch.mm(a, b)
        wait(device)
        seconds.append(time.perf_counter() - began)
    return 2.0 * size**3 / median(seconds[3:])


Step = Callable[[Mapping[str, Tensor]], float]


def plain_step(model: ResolvedModel, device: torch.device, seed: int, lr: float, compiled: bool) -> Step:
    """The model as users of plain PyTorch train it. Returns a function from a batch to its loss."""
    torch.manual_seed(seed)
    module = model.make().to(device)
    run = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, fused=True)

    def step(batch: Mapping[str, Tensor]) -> float:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = call_with_loss(run, batch, model.loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def shardwise_step(model: ResolvedModel, case: Case, device: torch.device, seed: int, lr: float) -> tuple[Step, float]:
    """shardwise on one rank: (function from a batch to its loss, the model's FLOPs a step)."""
    optimizer = {"name": "adamw", "lr": lr}
    engine = shardwise.parallelize(model, case.samples, plan=case.layout, world=World(device=device), seed=seed, optimizer=optimizer)
    return (lambda batch: engine.step(batch).loss), float(engine.model_flops)


def peak_bytes(step: Callable[[], float], device: torch.device) -> tuple[float, int]:
    """A step's loss, and the allocator's peak in it."""
    if device.type != "cuda":
        return step(), 0
    torch.cuda.reset_peak_memory_stats(device)
    return step(), torch.cuda.max_memory_allocated(device)


def kernels_of(step: Callable[[], float], device: torch.device) -> tuple[float, tuple[tuple[str, int, float], ...]]:
    """How long kernels run in a step, and those that take longest."""
    if device.type != "cuda":
        step()
        return 0.0, ()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        wait(device)
    found: dict[str, tuple[int, float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            count, seconds = found.get(event.name[:100], (0, 0.0))
            found[event.name[:100]] = count + 1, seconds + event.device_time_total / 1e6
    longest = sorted(found.items(), key=lambda item: -item[1][1])[:MOST_KERNELS]
    return sum(seconds for _, seconds in found.values()), tuple((name, *figures) for name, figures in longest)


def measure(case: Case, device: torch.device, effort: Effort) -> Measured:
    """shardwise and PyTorch in turns. The memory of each is taken before the other is there, or less what the other holds."""
    resolved = resolve(case.model, case.samples)
    batch = {k: v.to(device) for k, v in resolved.batch(case.samples).items()}
    ours, flops = shardwise_step(resolved, case, device, 0, 1e-4)
    steps = {"shardwise": ours}
    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    held = 0
    for name in ("shardwise", PEER):
        if name == PEER:
            held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            steps[PEER] = plain_step(resolved, device, 0, 1e-4, case.is_compiled)
        losses[name] = [steps[name](batch) for _ in range(effort.warm)]
        loss, peak = peak_bytes(lambda name=name: steps[name](batch), device)  # type: ignore[misc]
        losses[name].append(loss)
        memory[name], seconds[name] = max(0, peak - held), []
    for number in range(effort.rounds):
        for name in turn(list(steps), number):
            wait(device)
            began = time.perf_counter()
            losses[name] += [steps[name](batch) for _ in range(effort.steps)]
            wait(device)
            seconds[name].append((time.perf_counter() - began) / effort.steps)
    both = [tuple(of[name]) for of in (seconds, losses) for name in ("shardwise", PEER)]
    return Measured(
        case.model, case.samples, case.more, flops, *both, memory["shardwise"], memory[PEER], *kernels_of(lambda: ours(batch), device)
    )


def measure_what_fits(case: Case, device: torch.device, effort: Effort) -> Measured:
    """As `measure`, with the samples a step halved until both sides, which share the card, fit."""
    while True:
        try:
            return measure(case, device, effort)
        except (torch.OutOfMemoryError, OutOfMemory):
            if case.samples == 1:
                raise
        case = Case(case.model, case.samples // 2, case.more)  # outside of the handler, whose error holds the models
        _let_go(device)


def _let_go(device: torch.device) -> None:
    gc.collect()
    torch.compiler.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def predicted(case: Case, cluster: Cluster | str) -> Prediction | None:
    """What shardwise predicts for a case; None where it says that it cannot be."""
    try:
        return shardwise.plan(resolve(case.model, case.samples), case.samples, layout=case.layout, cluster=cluster).prediction
    except ShardwiseError as error:
        print(f"shardwise: {case.name} on {cluster}: {error}", file=sys.stderr)
        return None


def prediction_lines(rows: Sequence[Measured], card: Cluster, node: str) -> Iterator[str]:
    """The table of predictions beside what was measured."""
    yield "| case | measured | kernels | measured card | catalogue | memory | of PyTorch | memory predicted |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for one in rows:
        step = one.pair[0].median
        named = f"{node}{'' if one.case.is_compiled else '@eager'}" if node else ""
        by_card, by_name = (predicted(one.case, cluster) if cluster else None for cluster in (card, named))
        told_s = (_apart(p.step_time_s if p else 0.0, step) for p in (by_card, by_name))
        cells = [f"{step * 1e3:.1f} ms", f"{one.busy_s * 1e3:.1f} ms", *told_s]
        need = by_card.memory.total - by_card.memory.margin if by_card else 0.0
        held = f"{one.memory_bytes / 2**30:.2f} GiB | {one.peer_memory_bytes / 2**30:.2f} GiB"
        told = f"{need / 2**30:.2f} GiB ({need / one.memory_bytes - 1:+.0%})" if need and one.memory_bytes else ""
        yield f"| {one.case.name} | {' | '.join(cells)} | {held} | {told} |"


def _apart(predicted_s: float, measured_s: float) -> str:
    return f"{predicted_s * 1e3:.1f} ms ({predicted_s / measured_s - 1:+.0%})" if predicted_s else ""


def tell(file: Mapping[str, Any], console: Console, page: Path) -> None:
    """The tables of what was measured, and docs/benchmarks/gpu.md."""
    about = dict(file["header"])
    cases = [Measured(**{name: _tuples(value) for name, value in one.items()}) for one in file["measured"]]
    rows = [row(one.case.name, "gpu", *one.pair) for one in cases]
    verdicts = judge(TARGETS, rows)
    for one in cases[:1]:
        mfu, peer = (one.flops / series.median / file["peak"] for series in one.pair)
        about["mfu"] = f"{mfu:.3f} shardwise, {peer:.3f} {PEER}, {one.case.name}"
        said = f"{one.pair[0].median:.3f} s a step"
        verdicts = [*verdicts, Verdict("MFU against the measured peak", MFU_GOAL, mfu >= MFU_GOAL, mfu, one.case.name, said)]
    show(console, rows, verdicts, {})
    text = markdown(about, rows, verdicts, {}, {one.case.name: one.pair for one in cases}, INTRO)
    lines = [
        PREDICTED,
        "",
        *filter(None, [file.get("note")]),
        "",
        *prediction_lines(cases, parse_cluster(file["card"]), _node(about["gpu"])),
    ]
    page.write_text(text + "\n" + "\n".join(lines) + "\n", encoding="utf-8")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _node(card: str) -> str:
    """A machine of the catalogue that has such cards; "" where there is none."""
    machines = {Cluster.parse(name).device.name: f"1x{name}" for name in catalogue_names()}
    return machines.get(chip_of(card, machines), "")


def measured_file(given: argparse.Namespace, arguments: Sequence[str], console: Console) -> dict[str, Any]:
    """Measures all cases; what there is is written after each."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    began, peak = time.perf_counter(), matmul_peak(device)
    console.print(f"measured peak of bfloat16 matrix products: {peak / 1e12:.0f} TFLOP/s")
    card = dump(measure_here("", quick=True))
    name = torch.cuda.get_device_name(device)
    about = header(command("gpu", arguments), versions(("torch",)), gpu=name, peak_tflop_per_s=f"{peak / 1e12:.0f}")
    file: dict[str, Any] = {"header": about, "peak": peak, "card": card, "measured": []}
    for case in CASES:
        if given.model not in ("", case.model) or time.perf_counter() - began > given.seconds:
            continue
        try:
            found = measure_what_fits(case, device, Effort(given.rounds, given.steps, 3))
        except (ShardwiseError, RuntimeError) as error:
            console.print(f"{case.name}: {type(error).__name__}: {error}", markup=False)
            continue
        file["measured"].append(asdict(found))
        console.print(f"{case.name}: {found.pair[0].median * 1e3:.1f} ms, {PEER} {found.pair[1].median * 1e3:.1f} ms", markup=False)
        given.json.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
        _let_go(device)
    return file


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench gpu", description="models on one GPU beside plain PyTorch", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, default=PAGE.parent / "data" / "gpu.json", help="write what was measured to FILE")
    p.add_argument("--again", metavar="FILE", type=Path, help="measure nothing: the page of FILE, with today's predictions")
    p.add_argument("--page", metavar="FILE", type=Path, default=PAGE, help="write the page to FILE")
    p.add_argument("--model", default="", help="one of the cases' models; all by default")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after so long")
    given = p.parse_args(list(arguments))
    console = Console()
    if given.again:
        tell(json.loads(given.again.read_text(encoding="utf-8")), console, given.page)
        return 0
    reason = reason_to_skip()
    if reason:
        print(f"shardwise: bench gpu is skipped: {reason}")
        return 0
    tell(measured_file(given, arguments, console), console, given.page)
    return 0
