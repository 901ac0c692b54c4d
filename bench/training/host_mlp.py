"""A perceptron whose products take next to nothing: an engine and a plain loop beside plain PyTorch and DistributedDataParallel.

In: a number of ranks, and the library of float32 products: the launcher's choice for this machine, or torch's default, which is faster
where products are this small. Out: by side the seconds of whole steps, round by round, of the clock and of rank 0's processor, which other
processes on the machine change less, and the functions that Python calls in a step, of Python and of C. Sides take turns in one process a
rank. On one rank the peer is plain PyTorch, on more it is DistributedDataParallel with shardwise's own hook and gradients as views of
buckets; its backward is torch's own, which a divided module in the process replaces. What was before, and why:
[the fixed cost of a step](../decisions/fixed-cost-of-a-step.md).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from bench.common.measure import turn
from shardwise.capture.nesting import with_sample_count
from shardwise.run.engine import Engine
from shardwise.world.launch.launch import launch
from shardwise.world.world import World

WIDTH, ROWS = 64, 16
NOISE = 0.03
SIDES = ("engine", "loop", "peer")
Step = Callable[[Mapping[str, Tensor]], Tensor | float]


class Perceptron(nn.Module):
    """Three layers and a mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layers(x).squeeze(-1) - y).square().mean()


@dataclass(frozen=True)
class StepTimes:
    """By side the seconds of a step in each round, of the clock and of the processor; `losses`: after the same number of steps; `calls`:
    functions that Python calls in a step. `phases_s`: the clock's least seconds of the phases of an engine's step on rank 0."""

    ranks: int
    products: str
    clock_s: Mapping[str, Sequence[float]]
    processor_s: Mapping[str, Sequence[float]]
    losses: Mapping[str, float]
    calls: Mapping[str, int]
    phases_s: Mapping[str, float]


def ratio(seconds: Mapping[str, Sequence[float]], side: str) -> float:
    """Return a side's seconds over the peer's, the median of rounds."""
    return median(a / b for a, b in zip(seconds[side], seconds["peer"], strict=True))


def _engine(batch: Mapping[str, Tensor], plan: str, world: World) -> Engine:
    torch.manual_seed(0)
    engine: Engine = shardwise.parallelize(Perceptron(), batch, plan=plan, world=world, seed=0, optimizer={"name": "adamw", "lr": 1e-4})
    return engine


def _looped(model: nn.Module, backward: Callable[[Tensor], object] = lambda loss: loss.backward()) -> Step:  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(own: Mapping[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**own)
        backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def count_calls(step: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, Python calls in a step, hooks of autograd included."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, argument: found.append(event) if event in ("call", "c_call") else None)
    try:
        step()
    finally:
        sys.setprofile(None)
    return len(found) - 1  # the last one ends this


def _least_phases_s(engine: Engine, step: Callable[[], object], times: int) -> dict[str, float]:
    """Return the clock's least seconds of an engine's step and of its phases."""
    found: dict[str, list[float]] = {}
    for _ in range(times):
        began = time.perf_counter()
        step()
        for phase, seconds in {**engine.phase_times_s, "step": time.perf_counter() - began}.items():
            found.setdefault(phase, []).append(seconds)
    return {phase: min(seconds) for phase, seconds in found.items()}


def _peer(world: World, folder: str) -> nn.Module:
    torch.manual_seed(0)
    model = Perceptron()
    if world.num_ranks == 1:
        return model
    store = dist.FileStore(f"{folder}/store", world.num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.num_ranks)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel.register_comm_hook(*shardwise.comm_hook())
    return parallel


def measure_on_rank(world: World, rounds: int, steps: int, products: str, folder: str) -> tuple[dict[str, Any], ...]:
    """Measure all sides on one rank; every rank calls it. Returns by side seconds of the clock and of the processor, the mean loss and the
    number of calls, and seconds of an engine's phases."""
    torch.set_num_threads(1)
    torchs_backward = torch.autograd.backward
    if products:
        torch.set_float32_matmul_precision(products)
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(ROWS, WIDTH, generator=generator), "y": torch.randn(ROWS, generator=generator)}
    n, plan = world.num_ranks, f"data={world.num_ranks}"
    own = with_sample_count({name: x[world.rank * ROWS // n : (world.rank + 1) * ROWS // n] for name, x in batch.items()}, ROWS)
    torch.manual_seed(0)
    loop = _looped(shardwise.auto_parallelize(Perceptron(), batch, plan=plan, world=world))
    engine, peer = _engine(batch, plan, world), _looped(_peer(world, folder), torchs_backward)
    step_of: dict[str, Step] = {
        "engine": lambda own: engine.step(own, is_global_batch=n == 1, samples=ROWS).loss,
        "loop": loop,
        "peer": peer,
    }
    for _ in range(20):
        losses = {side: float(step_of[side](own)) for side in SIDES}
    mean = {
        side: x if side == "engine" else sum(world.world_group.all_gather(torch.tensor([x]), 0).tolist()) / n for side, x in losses.items()
    }
    clock_s, processor_s = ({side: list[float]() for side in SIDES} for _ in range(2))
    for number in range(rounds):
        for side in turn(SIDES, number):
            world.world_group.barrier()
            began_s, processor_began_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step_of[side](own)
            clock_s[side].append((time.perf_counter() - began_s) / steps)
            processor_s[side].append((time.process_time() - processor_began_s) / steps)
    calls = {side: count_calls(partial(step_of[side], own)) for side in SIDES}
    phases_s = _least_phases_s(engine, partial(step_of["engine"], own), rounds * steps)
    if n > 1:
        dist.destroy_process_group()
    return clock_s, processor_s, mean, calls, phases_s


def measure_steps(ranks: int, rounds: int, steps: int, products: str = "") -> StepTimes:
    """Measure all sides on so many ranks. `products`: torch's name of the precision of float32 products, by which it chooses their library;
    "": the launcher's choice. Raises SystemExit if the sides' losses differ."""
    with tempfile.TemporaryDirectory(prefix="shardwise-host-") as folder:
        found = StepTimes(ranks, products, *launch(measure_on_rank, ranks, rounds, steps, products, folder)[0])
    if max(found.losses.values()) - min(found.losses.values()) > 1e-6:
        raise SystemExit(f"losses of the sides differ: {dict(found.losses)}")
    return found


def table_lines(found: Sequence[StepTimes]) -> list[str]:
    """Return the page's lines: medians of rounds, and each side's least round beside the peer's least."""
    lines = [
        "| ranks | products | side | processor | beside the peer | least | beside | clock | beside the peer | calls |",
        "| --- " * 10 + "|",
    ]
    for times in found:
        peer = "plain PyTorch" if times.ranks == 1 else "DistributedDataParallel"
        for side in SIDES:
            cells = [str(times.ranks), times.products or "chosen", peer if side == "peer" else side]
            least_s = {name: min(seconds) for name, seconds in times.processor_s.items()}
            least = [f"{least_s[side] * 1e6:.0f} us", "" if side == "peer" else f"**{least_s[side] / least_s['peer']:.2f}**"]
            for seconds, more in ((times.processor_s, least), (times.clock_s, [str(times.calls[side])])):
                cells += [f"{median(seconds[side]) * 1e6:.0f} us", "" if side == "peer" else f"**{ratio(seconds, side):.2f}**", *more]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"In at most the peer's processor time, least beside least: {_verdict(found, 'engine')}; {_verdict(found, 'loop')}."]
    lines += ["", "| ranks | products | an engine's step, clock | forward and backward | gradients after it | update | the rest |"]
    lines.append("| --- " * 7 + "|")
    for times in found:
        phases = [times.phases_s[name] for name in ("program", "gradients", "optimizer")]
        cells = [f"{seconds * 1e6:.0f} us" for seconds in (times.phases_s["step"], *phases, times.phases_s["step"] - sum(phases))]
        lines.append(f"| {times.ranks} | {times.products or 'chosen'} | {' | '.join(cells)} |")
    return lines


def _verdict(found: Sequence[StepTimes], side: str) -> str:
    """Say whether a side's least round takes at most the peer's least, within the 3 % by which one side's differ between runs."""
    ratios = [min(times.processor_s[side]) / min(times.processor_s["peer"]) for times in found]
    highest = max(ratios)
    worst, met = found[ratios.index(highest)], "met" if highest <= 1 + NOISE else "missed"
    return f"{side} **{met}**, {highest:.2f} at most (ranks {worst.ranks}, products {worst.products or 'chosen'})"


CASES = ((1, ""), (1, "highest"), (2, ""), (2, "highest"))

if __name__ == "__main__":
    print(*table_lines([measure_steps(ranks, 15, 20, products) for ranks, products in CASES]), sep="\n")
