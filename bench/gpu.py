"""`scripts/bench gpu`: a GPT on one GPU, weft beside plain PyTorch with torch.compile, and several ranks on one card against serial.

Out: seconds a step, MFU against the measured matrix-product peak, rows as `--json FILE` has them, and docs/benchmarks/gpu.md. Where
torch sees no GPU it says so and ends with status 0. Both sides: bfloat16 autocast over float32 weights, fused AdamW, compiled, the
same batches; both live in one process and take turns. MFU counts matrix products once (no recomputation), attention in full.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import weft
from bench.arithmetic import Row, Series, Target, Verdict, as_json, judge, row
from bench.document import command, header, markdown, show, versions
from bench.measure import Effort, turn
from bench.parity import verified
from bench.processes import ROOT
from weft.errors import OutOfMemory
from weft.world.world import World
from weft.zoo.resolve import resolve
from weft.zoo.resolved import Resolved

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
PEER = "PyTorch with torch.compile"
TARGETS = (Target(f"step, beside {PEER}", 1.0, lambda r: r.peer_name == PEER),)
MFU_GOAL = 0.60
Parity = tuple[str, str, bool, float]  # model, layout, whether it equals the serial run, worst relative difference
PARITY = (("gpt-tiny", "data=1"), ("gpt-tiny", "data=2"), ("gpt-tiny", "tensor=2"), ("gpt-tiny", "pipeline=2 microbatches=2"))

INTRO = """One GPU. Ratios are PyTorch's time over weft's (more than 1: weft is faster). MFU is the model's FLOPs over the step time and
the rate of large bfloat16 matrix products measured in the same run."""


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


def plain_step(model: Resolved, device: torch.device, seed: int, lr: float, compiled: bool) -> Callable[[dict[str, Tensor]], float]:
    """The model as users of plain PyTorch train it. Returns a function from a batch to its loss."""
    torch.manual_seed(seed)
    module = model.make().to(device)
    run = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, fused=True)

    def step(batch: dict[str, Tensor]) -> float:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model.loss(run(batch["input_ids"]), batch)  # type: ignore[misc]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def weft_step(model: Resolved, size: int, device: torch.device, seed: int, lr: float, compiled: bool) -> tuple[Callable[..., float], float]:
    """weft on one rank: (function from a batch to its loss, the model's FLOPs a step)."""
    engine = weft.parallelize(
        model,
        size,
        plan="data=1 precision=bfloat16",
        world=World(device=device),
        seed=seed,
        compile=compiled,
        optimizer={"name": "adamw", "lr": lr},
    )
    return (lambda batch: engine.step(batch).loss), float(engine.model_flops)


def measure(model: str, size: int, device: torch.device, effort: Effort, compiled: bool = True) -> tuple[Series, Series, float]:
    """weft's and PyTorch's series, in turns, and the model's FLOPs a step."""
    resolved = resolve(model, size)
    batch = {k: v.to(device) for k, v in resolved.batch(size).items()}
    ours, flops = weft_step(resolved, size, device, 0, 1e-4, compiled)
    steps = {"weft": ours, PEER: plain_step(resolved, device, 0, 1e-4, compiled)}
    seconds: dict[str, list[float]] = {n: [] for n in steps}
    losses: dict[str, list[float]] = {n: [] for n in steps}
    for number in range(-1, effort.rounds):
        for name in turn(list(steps), number):
            count = effort.warm if number < 0 else effort.steps
            wait(device)
            began = time.perf_counter()
            losses[name] += [steps[name](batch) for _ in range(count)]
            wait(device)
            if number >= 0:
                seconds[name].append((time.perf_counter() - began) / count)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    plan = "data=1 precision=bfloat16"
    first, second = (
        Series(n, tuple(seconds[n]), (), tuple(losses[n]), memory, plan if n == "weft" else "", "bfloat16", "compiled") for n in steps
    )
    return first, second, flops


def measure_what_fits(model: str, size: int, device: torch.device, effort: Effort) -> tuple[Series, Series, float, int]:
    """As `measure`, with the samples a step halved until both sides, which share the card, fit; and how many those are."""
    while True:
        try:
            return *measure(model, size, device, effort), size
        except (torch.OutOfMemoryError, OutOfMemory):
            if size == 1:
                raise
        size //= 2  # outside of the handler, whose error holds the models
        gc.collect()
        torch.cuda.empty_cache()
        torch.compiler.reset()


def parity(device: str) -> list[Parity]:
    """Each layout's ranks, all on one card, beside the serial run."""
    out = []
    for model, layout in PARITY:
        found = verified(model, layout, 4, device)
        out.append((model, layout, bool(found["ok"]), max(map(float, found["worst"].values()))))
    return out


def page(about: Mapping[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict], pair: Sequence[Series], same: Sequence[Parity]) -> str:
    """docs/benchmarks/gpu.md."""
    text = markdown(about, rows, verdicts, {}, {str(about["model"]): pair}, INTRO)
    lines = ["## Several ranks on one card, beside the serial run, in float64", ""]
    lines += ["| model | layout | equal | worst |", "| --- | --- | --- | --- |"]
    lines += [f"| {model} | `{layout}` | {'yes' if ok else '**no**'} | {worst:.1e} |" for model, layout, ok, worst in same]
    return text + "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench gpu", description="a GPT on one GPU beside plain PyTorch", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, rows and targets to FILE")
    p.add_argument("--model", default="gpt-1.3b")
    p.add_argument("--batch", type=int, default=8, help="samples a step, each of the model's whole sequence")
    p.add_argument("--rounds", type=int, default=7)
    p.add_argument("--steps", type=int, default=5)
    given = p.parse_args(list(arguments))
    reason = reason_to_skip()
    if reason:
        print(f"weft: bench gpu is skipped: {reason}")
        if given.json:
            given.json.write_text(json.dumps({"header": header("scripts/bench gpu", {}), "rows": [], "skipped": {"gpu": reason}}) + "\n")
        return 0
    console = Console()
    same = parity("cuda")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    peak = matmul_peak(device)
    console.print(f"measured peak of bfloat16 matrix products: {peak / 1e12:.0f} TFLOP/s")
    effort = Effort(given.rounds, given.steps, 3)
    ours, theirs, flops, batch = measure_what_fits(given.model, given.batch, device, effort)
    if batch < given.batch:
        console.print(f"{given.batch} samples a step of both do not fit on the card; measured with {batch}")
    mfu = flops / ours.median / peak
    about = header(
        command("gpu", arguments),
        versions(("torch",)),
        gpu=torch.cuda.get_device_name(device),
        model=f"{given.model}, {batch} samples a step",
        peak_tflop_per_s=f"{peak / 1e12:.0f}",
        mfu=f"{mfu:.3f} weft, {flops / theirs.median / peak:.3f} {PEER}",
    )
    rows = [row(f"{given.model}, batch {batch}", "gpu", ours, theirs)]
    goal = Verdict("MFU against the measured peak", MFU_GOAL, mfu >= MFU_GOAL, mfu, rows[0].case, f"{ours.median:.3f} s a step")
    verdicts = [*judge(TARGETS, rows), goal]
    show(console, rows, verdicts, {})
    for model, layout, ok, worst in same:
        console.print(f"{model} {layout}: {'equals' if ok else 'DIFFERS FROM'} the serial run, worst {worst:.1e}", markup=False)
    if given.json:
        names = ("model", "layout", "ok", "worst")
        told = as_json(about, rows, verdicts, {}) | {"parity": [dict(zip(names, one, strict=True)) for one in same]}
        given.json.write_text(json.dumps(told, indent=1) + "\n")
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(about, rows, verdicts, (ours, theirs), same))
    if not all(ok for _, _, ok, _ in same):
        print("weft: several ranks on one card differ from the serial run", file=sys.stderr)
        return 4
    return 0
