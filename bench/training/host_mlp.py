"""A perceptron whose products take next to nothing: an engine and a plain loop beside plain PyTorch and DistributedDataParallel.

In: a number of ranks. Out: by side the seconds of whole steps, round by round, of the clock and of rank 0's processor, which other
processes on the machine change less; sides take turns in one process a rank. On one rank the peer is plain PyTorch, on more it is
DistributedDataParallel with shardwise's own hook and gradients as views of buckets.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from bench.common.measure import turn
from shardwise.capture.nesting import with_sample_count
from shardwise.world.launch.launch import launch
from shardwise.world.world import World

WIDTH, ROWS = 64, 16
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
    """By side the seconds of a step in each round, of the clock and of the processor; `losses`: after the same number of steps."""

    ranks: int
    clock_s: Mapping[str, Sequence[float]]
    processor_s: Mapping[str, Sequence[float]]
    losses: Mapping[str, float]


def ratio(seconds: Mapping[str, Sequence[float]], side: str) -> float:
    """Return a side's seconds over the peer's, the median of rounds."""
    return median(a / b for a, b in zip(seconds[side], seconds["peer"], strict=True))


def _engine(batch: Mapping[str, Tensor], plan: str, world: World) -> Step:
    torch.manual_seed(0)
    engine: Any = shardwise.parallelize(Perceptron(), batch, plan=plan, world=world, seed=0, optimizer={"name": "adamw", "lr": 1e-4})
    return lambda own: engine.step(own, is_global_batch=world.num_ranks == 1, samples=ROWS).loss


def _looped(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(own: Mapping[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**own)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


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


def measure_on_rank(world: World, rounds: int, steps: int, folder: str) -> tuple[dict[str, list[float]], ...]:
    """Measure all sides on one rank; every rank calls it. Returns by side seconds of the clock and of the processor, and [mean loss]."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    batch = {"x": torch.randn(ROWS, WIDTH, generator=generator), "y": torch.randn(ROWS, generator=generator)}
    n, plan = world.num_ranks, f"data={world.num_ranks}"
    own = with_sample_count({name: x[world.rank * ROWS // n : (world.rank + 1) * ROWS // n] for name, x in batch.items()}, ROWS)
    torch.manual_seed(0)
    loop = _looped(shardwise.auto_parallelize(Perceptron(), batch, plan=plan, world=world))
    step_of: dict[str, Step] = {"engine": _engine(batch, plan, world), "loop": loop, "peer": _looped(_peer(world, folder))}
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
    if n > 1:
        dist.destroy_process_group()
    return clock_s, processor_s, {side: [x] for side, x in mean.items()}


def measure_steps(ranks: int, rounds: int, steps: int) -> StepTimes:
    """Measure all sides on so many ranks. Raises SystemExit if their losses differ."""
    with tempfile.TemporaryDirectory(prefix="shardwise-host-") as folder:
        clock_s, processor_s, losses = launch(measure_on_rank, ranks, rounds, steps, folder)[0]
    found = StepTimes(ranks, clock_s, processor_s, {side: x for side, (x,) in losses.items()})
    if max(found.losses.values()) - min(found.losses.values()) > 1e-6:
        raise SystemExit(f"losses of the sides differ: {dict(found.losses)}")
    return found


def table_lines(found: Sequence[StepTimes]) -> list[str]:
    """Return the page's lines."""
    lines = [
        "| ranks | side | processor | beside the peer | least | clock | beside the peer |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for times in found:
        peer = "plain PyTorch" if times.ranks == 1 else "DistributedDataParallel"
        for side in SIDES:
            cells = [str(times.ranks), peer if side == "peer" else side]
            for seconds in (times.processor_s, times.clock_s):
                cells += [f"{median(seconds[side]) * 1e6:.0f} us", "" if side == "peer" else f"**{ratio(seconds, side):.2f}**"]
            cells.insert(4, f"{min(times.processor_s[side]) * 1e6:.0f} us")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    print(*table_lines([measure_steps(ranks, 15, 20) for ranks in (1, 2)]), sep="\n")
