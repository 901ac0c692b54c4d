"""One rank of `scripts/bench planned`, on its own emulated host. It builds engines and runs steps as it is told, over lines of JSON.

Started as `python -m bench.planning.planned_rank SOCKET`, with torchrun's variables in the environment.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
import traceback
from typing import Any

import torch

from bench.common.rank import Line
from shardwise.plan.plan_file import parse_plan
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.world.comm.group import Group
from shardwise.world.launch.join import join
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve


def links(world: World, sizes: list[int]) -> list[dict[str, Any]]:
    """Seconds of collectives between all ranks and of a message between the first two, by bytes of the whole tensor.

    Several follow one another, as in a step: after a barrier ranks set out apart.
    """
    group = world.world_group
    n = world.num_ranks
    found = []
    for name in ("all_reduce", "all_gather", "reduce_scatter", "send"):
        points = []
        for size in sizes:
            number = max(n, size // 4 // n * n)
            times = []
            repeats = 10 if size <= 65536 else 5 if size <= 1 << 20 else 2
            for i in range(8 if size <= 1 << 20 else 4):
                group.barrier()
                began = time.perf_counter()
                for _ in range(repeats):
                    _move(name, group, number)
                if i:
                    times.append((time.perf_counter() - began) / repeats)
            points.append((size, (0.5 if name == "send" else 1.0) * sorted(times)[len(times) // 2]))
        found.append({"collective": name, "points": points})
    return found


def _move(name: str, group: Group, number: int) -> None:
    whole = torch.zeros(number)
    part = torch.zeros(number // group.size)
    if name == "all_reduce":
        group.all_reduce(whole)
    elif name == "all_gather":
        group.all_gather_into(whole, part)
    elif name == "reduce_scatter":
        group.reduce_scatter_into(part, whole)
    elif group.index < 2:
        first, second = (group.isend, group.irecv) if group.index == 0 else (group.irecv, group.isend)
        first(whole, 1 - group.index).wait()
        second(whole, 1 - group.index).wait()


class Rank:
    """Engines by name, those of one rank alone among them. A model is traced once for all its plans."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.engines: dict[str, tuple[Engine, Any, World, int]] = {}
        self.model = ""
        self.source: CachedModelSource | None = None

    def build(self, order: dict[str, Any]) -> dict[str, Any]:
        plan = parse_plan(order["plan"])
        alone = plan.layout.num_ranks == 1
        world = World(threads=order["threads"]) if alone else self.world
        torch.set_num_threads(order["threads"])
        subject = resolve(order["model"], order["batch"], order["sequence"])
        batch = subject.batch(order["batch"])
        if order["model"] != self.model:
            torch.manual_seed(0)
            self.model, self.source = order["model"], CachedModelSource.from_model(subject.make)
        engine = Engine(plan, self.source, batch, subject.loss, world, "adamw", seed=0)
        self.engines[order["key"]] = (engine, batch, world, order["threads"])
        return {}

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        engine, batch, world, threads = self.engines[order["key"]]
        torch.set_num_threads(threads)
        seconds = []
        for _ in range(order["steps"]):
            if world.num_ranks > 1:
                world.world_group.barrier()
            began = time.perf_counter()
            engine.step(batch)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds}

    def drop(self, order: dict[str, Any]) -> dict[str, Any]:
        self.engines.pop(order["key"], None)
        gc.collect()
        return {"memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}

    def links(self, order: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(1)
        return {"tables": links(self.world, order["sizes"])}


def main(path: str) -> None:
    # A host's cores are its own.
    each, cores, rank = int(os.environ["OMP_NUM_THREADS"]), sorted(os.sched_getaffinity(0)), int(os.environ["RANK"])
    os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each] or cores)
    world = join(os.environ, "cpu")
    line = Line(path, world.rank, world.num_ranks)
    rank = Rank(world)
    while (order := line.receive())["do"] != "stop":
        try:
            line.send({"ok": True, **getattr(rank, order["do"])(order)})
        except Exception as error:
            traceback.print_exc()
            line.send({"ok": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
    os._exit(0)  # groups may wait for each other at exit; nothing is left to save


if __name__ == "__main__":
    main(sys.argv[1])
