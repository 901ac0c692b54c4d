"""`scripts/bench collectives --algorithms`: all-reduce algorithms as shardwise runs them, beside what was predicted; `auto` beside the
best.

In: numbers of ranks, sizes. Out: a table for each number of ranks and transport, docs/benchmarks/collectives-algorithms.md, `--json FILE`.
The machine is probed first, and the predictions are of that probe alone. Algorithms take turns within a round, in an order that turns, each
with a tensor of its own, as buckets of gradients are; a call begins when all ranks have come, and its time is that of the slowest rank.
All sizes are gone through twice, which shows how far one measurement foretells the other. Not measured: what it costs the computation
beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.common.document import command, header, versions
from bench.common.processes import ROOT
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.probe import probe
from shardwise.collectives import ALGORITHMS, build
from shardwise.cost.network.collectives import algorithm_times, choose_algorithms
from shardwise.cost.network.network import RankGroup as GroupShape
from shardwise.plan.ir.choice import NATIVE
from shardwise.world.comm.runner import runner_of
from shardwise.world.comm.running import ProgramRunner
from shardwise.world.launch.launch import Launcher
from shardwise.world.launch.watch import LaunchOptions
from shardwise.world.world import World

PAGE = ROOT / "docs" / "benchmarks" / "collectives-algorithms.md"
SIZES = tuple(4**i << 10 for i in range(1, 10))  # 4 KiB to 256 MiB
NAMES = (NATIVE, *(name for name in ALGORITHMS["all_reduce"] if name != "hierarchical"))
TRANSPORTS = {"shared memory": "", "gloo": "gloo"}
WITHIN, FROM = 0.15, 64 << 10  # what a prediction may miss by, above which size
BEST = 1.05  # what `auto` may take against the fastest
Times = dict[tuple[int, str], float]  # (bytes, algorithm) -> seconds, the median
PASSES = 2  # over all sizes
CACHED_BYTES = 8 << 20  # of a rank's tensors at least: one that is summed again and again stays in a core's own cache, in no training step

INTRO = f"""\
All-reduce of float32 by every algorithm that shardwise runs from its program, messages over shared memory or over gloo, and by the
transport
itself (`native`), one thread a rank. Each cell: measured (the median), and by how much the prediction misses it,
from what `shardwise probe` measured just before. `auto` is what `all_reduce=auto` chooses by these predictions, and its measured time
against
that of the fastest. Wanted: predictions within {WITHIN:.0%} above {FROM >> 10} KiB, `auto` within {BEST - 1:.0%} of the best. All
sizes were gone through {PASSES} times; how many of the first time's are as near to the second's is said beside, as what a prediction could
reach."""


@dataclass(frozen=True, slots=True)
class Case:
    """One number of ranks on one transport: what was measured (in all, and each time), what was predicted, what `auto` takes by size."""

    ranks: int
    transport: str
    measured: Times
    predicted: Times
    auto: dict[int, str]
    passes: tuple[Times, ...] = ()

    @property
    def sizes(self) -> list[int]:
        return sorted({size for size, _ in self.measured})

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.measured))

    def misses(self, above: int = FROM) -> dict[tuple[int, str], float]:
        """(bytes, algorithm) -> predicted over measured, less one."""
        return {key: self.predicted[key] / s - 1 for key, s in self.measured.items() if key[0] > above}

    def strayed(self, above: int = FROM) -> dict[tuple[int, str], float]:
        """(bytes, algorithm) -> the first time that it was measured over the last, less one."""
        first, last = self.passes[0], self.passes[-1]
        return {key: first[key] / s - 1 for key, s in last.items() if key[0] > above}

    def lost(self) -> dict[int, float]:
        """bytes -> what `auto`'s choice took over what the fastest took."""
        best = {size: min(s for (at, _), s in self.measured.items() if at == size) for size in self.sizes}
        return {size: self.measured[size, self.auto[size]] / best[size] for size in self.sizes}


def rank_times(world: World, transport: str, sizes: list[int], names: list[str], rounds: int, budget_s: float) -> list[list[Any]]:
    """[bytes, algorithm, seconds of the slowest rank by round, for each pass]; runs in every rank."""
    over = World(world.rank, world.num_ranks, world._store, generation=50, transport=transport, timeout_s=300.0) if transport else world
    group = over.world_group
    programs = ProgramRunner(runner_of(group))
    clock = world.world_group
    made = {name: build("all_reduce", name, world.num_ranks) for name in names if name != NATIVE}
    found: dict[tuple[int, str], list[list[float]]] = {}
    for size in sorted(sizes, reverse=True) * PASSES:  # the largest first: rings, windows and pages are then as in a long run
        tensors = cycle([torch.zeros(size // 4) for _ in range(max(1, min(64, CACHED_BYTES // size)))])
        calls: dict[str, Callable[[torch.Tensor], object]] = {name: lambda x, p=p: programs.all_reduce(p, x) for name, p in made.items()}  # type: ignore[misc]
        calls[NATIVE] = group.all_reduce
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for call in (calls[name] for name in names):  # connects, agrees, takes memory
            call(next(tensors))
        spent = torch.zeros(1)
        for number in range(rounds):
            began_round = time.perf_counter()
            for name in [*names[number % len(names) :], *names[: number % len(names)]]:
                x = next(tensors)
                clock.barrier()
                began = time.perf_counter()
                calls[name](x)
                seconds[name].append(time.perf_counter() - began)
            spent += time.perf_counter() - began_round
            clock.all_reduce(spent, op="max")  # all ranks stop together
            if number >= 1 and float(spent) > budget_s / PASSES:
                break
        slowest = torch.tensor([seconds[name] for name in names], dtype=torch.float64)
        clock.all_reduce(slowest, op="max")
        for name, row in zip(names, slowest, strict=True):
            found.setdefault((size, name), []).append(row.tolist())
    return [[size, name, passes] for (size, name), passes in found.items()]


def predictions(cluster: Cluster, ranks: int, transport: str, sizes: Sequence[int]) -> tuple[Times, dict[int, str]]:
    """What shardwise predicts for these ranks of the machine, and what `auto` would take."""
    shape = GroupShape(ranks)
    times = algorithm_times(cluster, shape, transport)
    chosen = choose_algorithms(cluster, shape, transport)
    return {(size, name): times[name](size) for size in sizes for name in NAMES}, {size: chosen.algorithm_for(size) for size in sizes}


def cases(
    cluster: Cluster, counts: Sequence[int], sizes: Sequence[int], rounds: int, budget_s: float, say: Callable[[str], None]
) -> list[Case]:
    """Everything, measured and predicted."""
    found = []
    with Launcher() as launcher:
        for ranks in counts:
            for label, transport in TRANSPORTS.items():
                rows = launcher.launch(
                    rank_times,
                    ranks,
                    transport,
                    list(sizes),
                    list(NAMES),
                    rounds,
                    budget_s,
                    options=LaunchOptions(threads=1, timeout_s=600.0),
                )[0]
                predicted, auto = predictions(cluster, ranks, transport, sizes)
                whole = {(size, name): median(s for times in passes for s in times) for size, name, passes in rows}
                each = tuple({(size, name): median(passes[i]) for size, name, passes in rows} for i in range(PASSES))
                found.append(Case(ranks, label, whole, predicted, auto, each))
                say(f"{ranks} ranks over {label}: {verdict(found[-1])}")
    return found


def verdict(case: Case) -> str:
    """In words: how many predictions are within what is wanted, the worst, and the worst of `auto`."""
    misses, lost = case.misses(), case.lost()
    close = sum(abs(miss) <= WITHIN for miss in misses.values())
    key = max(misses, key=lambda k: abs(misses[k]))
    worst = max(lost, key=lost.__getitem__)
    mean = median(abs(miss) for miss in misses.values())
    near = sum(abs(miss) <= WITHIN for miss in case.strayed().values()) if case.passes else 0
    again = f"; the first measurement within {WITHIN:.0%} of the second in {near}" if case.passes else ""
    return (
        f"{close} of {len(misses)} predictions within {WITHIN:.0%} (half within {mean:.0%}, worst {key[1]} at {bytes_word(key[0])} by "
        f"{misses[key]:+.0%}){again}; auto at worst {lost[worst]:.2f} of the best, at {bytes_word(worst)} ({case.auto[worst]})"
    )


def bytes_word(size: int) -> str:
    """4 KiB, 1 MiB."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def time_word(seconds: float) -> str:
    """Three digits."""
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def lines_of(case: Case) -> list[str]:
    """A Markdown table of one case."""
    rows = [["bytes", *case.names, "auto", "auto / best"]]
    for size in case.sizes:
        cells = [bytes_word(size)]
        for name in case.names:
            measured = case.measured[size, name]
            cells.append(f"{time_word(measured)} ({case.predicted[size, name] / measured - 1:+.0%})")
        rows.append([*cells, case.auto[size], f"{case.lost()[size]:.2f}"])
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|" + " --- |" * len(rows[0]), *body]


def page(about: Mapping[str, Any], found: Sequence[Case]) -> str:
    """docs/benchmarks/collectives-algorithms.md."""
    parts = ["# Benchmark: all-reduce algorithms, measured and predicted", "", "Written by the run itself.", "", "| | |", "| --- | --- |"]
    parts += [f"| {key} | {f'`{value}`' if key == 'command' else value} |" for key, value in about.items()]
    parts += ["", INTRO, ""]
    for case in found:
        parts += [f"## {case.ranks} ranks over {case.transport}", "", f"{verdict(case)}.", "", *lines_of(case), ""]
    return "\n".join(parts)


def measure(arguments: Sequence[str], counts: Sequence[int], quick: bool, target: Path | None, say: Callable[[str], None]) -> int:
    """Probe, measure, predict, write. `quick`: three sizes, few rounds, no page."""
    import json

    load = os.getloadavg()[0]
    cluster = probe(fresh=True)
    say(f"probed: {cluster.device.name}, {cluster.num_devices} cores ({cluster.device.source})")
    sizes = (64 << 10, 1 << 20, 4 << 20) if quick else SIZES
    found = cases(cluster, counts, sizes, 5 if quick else 25, 1.0 if quick else 8.0, say)
    about = header(command("collectives", arguments), versions(("torch",)))
    about["other work"] = f"load average {load:.1f} before the run"
    about["versions"] = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    if target is not None:
        rows = [
            {"ranks": c.ranks, "transport": c.transport, "bytes": size, "algorithm": name, "measured_s": s,
             "predicted_s": c.predicted[size, name], "auto": c.auto[size]}
            for c in found for (size, name), s in c.measured.items()
        ]  # fmt: skip
        target.write_text(json.dumps({"about": about, "rows": rows}))
    if quick:
        for case in found:
            say("\n".join([f"{case.ranks} ranks over {case.transport}", *lines_of(case)]))
    else:
        PAGE.write_text(page(about, found))
        say(f"written: {PAGE.relative_to(ROOT)}")
    return 0
