"""What shardwise's executor adds to the compute: processor time an action in Python, and how measured steps lie beside simulated ones.

In: a model of the zoo, schedules. Out: microseconds an action; per schedule the total of a measured step and of the simulated one, whose
computes take what they took in the median. Not modelled in the simulation: transfers, which cost the receiver a copy.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.common.case import Case
from shardwise.api import plan as make_plan
from shardwise.plan.ir.program import Compute, Program
from shardwise.plan.ir.timeline import COMPUTE_LANE, Span, Timeline
from shardwise.plan.ir.timeline_difference import compare_by_action
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.simulate.clock import simulate
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

STAGES, MICROBATCHES = 4, 8  # of the tiny model
STEPS = 60


class Tiny(nn.Module):
    """A product and a comparison a stage: next to no compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


@dataclass(frozen=True, slots=True)
class Overhead:
    """Processor seconds an action, median of steps: of the executor with gradients collected, and of the calls that it makes alone."""

    schedule: str
    actions: int
    whole_s: float
    compute_s: float

    @property
    def overhead_us(self) -> float:
        """Microseconds of an action that are not compute."""
        return (self.whole_s - self.compute_s) * 1e6


def overhead(num_ranks: int) -> Overhead:
    """Of interleaved 1F1B of four stages on this many ranks, the worst rank; with two ranks messages are in it."""
    batch = (torch.randn(8 * MICROBATCHES, 16),)
    layout = Layout(pipeline=num_ranks, chunks=STAGES // num_ranks, microbatches=MICROBATCHES, schedule="interleaved", threads=1)
    sites = tuple(f"layers.{i}/linear" for i in range(1, STAGES))
    plan = Plan(layout, "tiny", "here", 8 * MICROBATCHES, sites)

    def on_rank(world: World) -> tuple[int, float, float]:
        engine = Engine(plan, Tiny, batch, None, world, seed=0)
        whole = [_processor_s(lambda: engine.forward_backward(batch), world) for _ in range(STEPS)]
        bare = [_processor_s(lambda: _computes(engine, engine._local_inputs(batch)), world) for _ in range(STEPS)]
        other = [_processor_s(lambda: engine._local_inputs(batch), world) for _ in range(STEPS)]
        actions = sum(isinstance(a, Compute) for a in engine.rank_model.program.actions[world.rank])
        return actions, median(whole[STEPS // 4 :]) / actions, (median(bare[STEPS // 4 :]) - median(other)) / actions

    found = launch(on_rank, num_ranks, timeout_s=120, show=False)
    return max((Overhead(str(layout), *row) for row in found), key=lambda o: o.overhead_us)


def _processor_s(work: Any, world: World) -> float:
    world.world_group.barrier()
    began = time.process_time()
    work()
    return time.process_time() - began


def _computes(engine: Engine, inputs: Sequence[Mapping[str, Tensor]]) -> None:
    """The same forwards and backwards, called one after the other on tensors that are there."""
    executor, variables = engine.executor, engine.rank_model.variables
    for m in range(MICROBATCHES):
        for number, runner in executor.runners.items():
            received = [
                torch.zeros(c.shape, dtype=c.dtype).requires_grad_()
                for (_, to), cs in executor.crossings.items()
                if to == number
                for c in cs
            ]
            args = [variables[v] if v in variables else inputs[m][v] for v in runner.local.variables]
            (made,) = runner.module(*args, *received)
            torch.autograd.backward(made, torch.ones_like(made))


@dataclass(frozen=True, slots=True)
class Beside:
    """A measured step of a schedule beside the simulated one. `farthest`: the action whose end differs most, in shares of the total."""

    schedule: str
    measured_s: float
    simulated_s: float
    farthest: str
    farthest_share: float

    @property
    def difference(self) -> float:
        """The measured total over the simulated one, less one."""
        return self.measured_s / self.simulated_s - 1


def beside(case: Case, layout: str, steps: int = 7) -> Beside:
    """Measure some steps, simulate with the median time of each stage's computes, and compare the step of median length."""
    resolved = resolve(case.model)
    batch = resolved.batch(case.batch)
    torch.manual_seed(case.seed)
    source = ModelSource.from_model(resolved.make)
    plan = make_plan(resolved.make, batch, loss=resolved.loss, cluster="1xcpu-2", layout=Layout.parse(layout), source=source)
    plan = replace(plan, layout=replace(plan.layout, threads=1))

    def on_rank(world: World) -> tuple[str, list[list[tuple[Any, ...]]], list[str]]:
        engine = Engine(plan, source, batch, resolved.loss, world, seed=case.seed)
        found = []
        for number in range(-2, steps):
            engine.step(batch, record=True)
            if number >= 0 and engine.timeline is not None:
                found.append([tuple(span) for span in engine.timeline.spans])
        executor = engine.executor
        return (
            str(engine.rank_model.program),
            found,
            [str(executor.program.actions[executor.rank][step]) for step in executor.threads_by_step],
        )

    rows = launch(on_rank, plan.layout.num_ranks, timeout_s=240, show=False)
    timelines = [Timeline(layout, len(rows), tuple(Span(*span) for _, spans, _ in rows for span in spans[step])) for step in range(steps)]
    measured = sorted(timelines, key=lambda t: t.total_s)[steps // 2]
    return _compared(layout, measured, timelines, rows[0][0], {name for _, _, lent in rows for name in lent})


def _compared(layout: str, measured: Timeline, timelines: Sequence[Timeline], program: str, lent: set[str]) -> Beside:
    """`lent`: actions with cores of ranks that wait, which take a time of their own."""

    def kind(action: str) -> str:
        return _kind(action) + " lent" * (action in lent)

    seconds: dict[str, list[float]] = defaultdict(list)
    for timeline in timelines:
        for span in timeline.spans:
            if span.lane == COMPUTE_LANE:
                seconds[kind(span.name)].append(span.duration_s)
    simulated = simulate(Program.parse(program), lambda action: median(seconds[kind(str(action))]), lambda *_: 0.0)
    found = compare_by_action(simulated, measured)
    last = max(found.actions, key=lambda d: abs(d.delay_s))
    return Beside(layout, measured.total_s, simulated.total_s, f"{last.name} of rank {last.rank}", last.delay_s / simulated.total_s)


def _kind(action: str) -> str:
    """An action without its microbatch: `2F11` -> `2F`."""
    return action.rstrip("0123456789")
