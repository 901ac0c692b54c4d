"""The published shape of GEMS: its speed-up over MP-Basic by number of batches, simulated and measured.

Jain et al. 2020: MAST trains two batches at a time, one a replica; MASTER goes on with as many as there are, and updates once. MP-Basic
trains them one after another. At most two of the ranks compute at a time, so two cores measure pipelines of any depth, with one thread a
rank; what they share (the caches, the memory's bandwidth) the simulated shape does not know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import shardwise
from bench.common.measure import turn
from shardwise.errors import ShardwiseError
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.schedules import build
from shardwise.simulate.clock import simulate
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

# Equal blocks, small enough that updates and sums are short beside them.
MODEL = "resnet:blocks=16,bottleneck=false,base=32,image=96,classes=16"
BATCH = 4  # of MP-Basic; GEMS trains so many batches of it a step
SILENT_S = 300.0


@dataclass(frozen=True, slots=True)
class Point:
    """Speed-up of GEMS over MP-Basic with so many stages and batches: by the clock with equal stages, and `measured` or why not."""

    stages: int
    batches: int
    simulated: float
    measured: float = 0.0
    least: float = 0.0
    most: float = 0.0
    why: str = ""


def shape_of_gems(numbers: Sequence[int], stages: Sequence[int]) -> list[Point]:
    """By the clock, with a backward of two forwards and free transfers."""
    rows = []
    for d in stages:
        one = _simulated("sequential", d, 1)
        rows += [Point(d, n, n * one / _simulated("gems-master", d, n)) for n in numbers]
    return rows


def _simulated(schedule: str, stages: int, microbatches: int) -> float:
    seconds = {"F": 1.0, "B": 2.0}
    return simulate(build(schedule, stages, microbatches), lambda action: seconds[action.op.value], lambda *_: 0.0).total_s


def measured_shape(
    points: Sequence[Point], stages: Sequence[int], rounds: int, model: str = MODEL, batch: int = BATCH, cluster: str = "here"
) -> list[Point]:
    """The same points with those of `stages` measured: ratios by round, and their median."""
    found = {d: _of_depth(d, [p.batches for p in points if p.stages == d], rounds, model, batch, cluster) for d in stages}
    made = []
    for point in points:
        ratios = found.get(point.stages, {})
        if isinstance(ratios, str):
            made.append(Point(point.stages, point.batches, point.simulated, why=ratios))
        elif by_round := ratios.get(point.batches):
            made.append(Point(point.stages, point.batches, point.simulated, median(by_round), min(by_round), max(by_round)))
        else:
            made.append(point)
    return made


def _of_depth(stages: int, numbers: Sequence[int], rounds: int, model: str, batch: int, cluster: str) -> dict[int, list[float]] | str:
    """[batches] -> the speed-up in every round, all in the same ranks; the reason where it does not run."""
    subject = resolve(model)
    torch.manual_seed(0)
    source = CachedModelSource.from_model(subject.make)
    layouts = {0: f"pipeline={stages} schedule=sequential threads=1 lend=off"}
    layouts |= {n: f"pipeline={stages} microbatches={n} schedule=gems-master threads=1 lend=off" for n in numbers}
    try:
        batches = {n: subject.batch(batch * max(n, 1)) for n in layouts}
        plans = {n: shardwise.plan(subject, batches[n], cluster=cluster, layout=text, source=source) for n, text in layouts.items()}
        for n, plan in plans.items():
            source.capture_all(plan, batches[n], subject.loss)

        def work(world: World) -> Any:
            engines = {n: Engine(plans[n], source, batches[n], subject.loss, world, seed=0) for n in plans}
            seconds: dict[int, list[float]] = {n: [] for n in plans}
            for number in range(-1, rounds):
                for n in turn(list(plans), number + 1):
                    world.world_group.barrier()
                    began = time.perf_counter()
                    for _ in range(max(numbers) // max(n, 1)):  # as many batches in every turn
                        engines[n].step(batches[n])
                    world.world_group.barrier()
                    if number >= 0:
                        seconds[n].append(time.perf_counter() - began)
            return [[n, took] for n, took in seconds.items()]

        taken = dict(launch(work, stages, show=False, timeout_s=SILENT_S)[0])
    except ShardwiseError as error:
        return str(error).splitlines()[0]
    return {n: [one / other for one, other in zip(taken[0], taken[n], strict=True)] for n in numbers}
