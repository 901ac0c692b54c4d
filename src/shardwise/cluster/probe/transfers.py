"""Communication benchmark. In: a world. Out: seconds by bytes, as tables that `shardwise.cost.network.collectives` reads. [torch]"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch

from shardwise.collectives import ALGORITHMS, build
from shardwise.plan.ir.program import Action, Program, Recv, Send, Value
from shardwise.world.comm.runner import runner_of

SIZES = tuple(4**k << 10 for k in range(1, 8))  # 4 KiB to 16 MiB: interpolated linearly in logarithms
FULL_SIZES = (1 << 10, *SIZES, 64 << 20)
PIECES = 4
WARM, WARM_S, AGAIN_S = 40, 0.01, 0.002  # maximum warm-up calls, and their approximate time, first and later
PASSES = 3  # over all sizes: a disturbance of a second then spoils a third of a size's samples, not all
QUICK, FULL = 2, 6  # samples of a pass
FEW, MANY = 1, 5  # numbers of passed chunks, whose difference gives the time of a message
Pieces = Sequence[torch.Tensor]
Points = list[tuple[int, float]]


def measure_messages(world: Any, quick: bool = True) -> list[tuple[str, int, Points]]:
    """Measure tables of the steps of collective programs, over shared memory and over gloo (`.gloo`), on all ranks at once.

    `send`: half of the ranks send to the others; `exchange`: each sends to the next and receives from the one before; `add`: each adds
    local data; `all_reduce`: the transport's own. `call` and `step`, of one size: overhead of running a program, and of each of its
    messages. `program.NAME`: whole all-reduces by programs, of every second size. Times are of the slowest rank. Large tensors come
    first: ring buffers, windows and pages are then as in a long run.
    """
    from shardwise.world.comm.running import ProgramRunner  # here: only ranks run it, which have loaded these
    from shardwise.world.world import World

    n = world.num_ranks
    over_gloo = World(world.rank, n, world._store, generation=1, transport="gloo")
    sizes, samples = (SIZES, QUICK) if quick else (FULL_SIZES, FULL)
    buffers = [torch.zeros(2 * sizes[-1] // 4) for _ in range(2)]  # 2 chunks of the largest size for all cases
    groups = {"": world.world_group, ".gloo": over_gloo.world_group}
    programs = {suffix: ProgramRunner(runner_of(group)) for suffix, group in groups.items()}
    by_name = {name: build("all_reduce", name, n) for name in ALGORITHMS["all_reduce"] if name != "hierarchical"}
    passing = {count: _build_passing_program(n, count) for count in (FEW, MANY)}
    for runner in programs.values():  # the programs' own connections: their pages stay mapped
        for program in by_name.values():
            runner.all_reduce(program, buffers[0][: sizes[-1] // 4])
    times: dict[tuple[str, int], list[float]] = {}
    for warm_s in (WARM_S, *[AGAIN_S] * (PASSES - 1)):
        for suffix, group in groups.items():
            for size in reversed(sizes):
                # Programs and gradient buckets go through memory: a chunk sent repeatedly would stay in a core's own cache.
                count = PIECES if size < sizes[-1] else 2
                x, y = (half[: count * size // 4].view(count, -1).unbind() for half in buffers)
                run = {f"program.{name}": program for name, program in by_name.items() if size in sizes[::2]}
                run |= {f"passing.{passes}": program for passes, program in passing.items() if size == sizes[0]}
                cases = _build_calls(world, group, x, y)
                cases |= {name: partial(programs[suffix].all_reduce, program, x[0]) for name, program in run.items()}
                parts = {"send": 0.5 / count, "exchange": 1 / count, "add": 1 / count}
                for name, samples_s in _time_calls(world, cases, samples, warm_s).items():
                    times.setdefault((name + suffix, size), []).extend(parts.get(name, 1.0) * seconds for seconds in samples_s)
    typical = {key: median(samples_s) for key, samples_s in times.items()}
    tables: dict[str, Points] = {}
    for suffix in groups:
        few_s, many_s = (typical.pop((f"passing.{count}{suffix}", sizes[0])) for count in passing)
        message = max(0.0, (many_s - few_s) / (MANY - FEW))
        tables[f"step{suffix}"] = [(sizes[0], max(0.0, message - typical[f"exchange{suffix}", sizes[0]]))]
        tables[f"call{suffix}"] = [(sizes[0], max(0.0, few_s - FEW * message))]
    for (name, size), seconds in sorted(typical.items()):
        tables.setdefault(name, []).append((size, seconds))
    return [(name, n, points) for name, points in tables.items()]


def _build_calls(world: Any, group: Any, x: Pieces, y: Pieces) -> dict[str, Callable[[], object]]:
    """Return the timed calls between the ranks of `group`, which has all ranks of the world: from chunks `x` to chunks `y`."""
    n, index = group.size, group.index
    half = n // 2
    summed = cycle(x)

    def send() -> None:
        for leaves, comes in zip(x, y, strict=True):
            (group.isend(leaves, index + half) if index < half else group.irecv(comes, index - half)).wait()
            (group.irecv(comes, index + half) if index < half else group.isend(leaves, index - half)).wait()

    def exchange() -> None:
        for leaves, comes in zip(x, y, strict=True):
            arriving, leaving = group.irecv(comes, (index - 1) % n), group.isend(leaves, (index + 1) % n)
            arriving.wait()
            leaving.wait()

    def add() -> None:
        for target, addend in zip(x, y, strict=True):
            torch.add(target, addend, out=target)
        if n > 2:
            world.world_group.barrier()  # wait for ranks that have no core yet

    calls = {"send": send, "exchange": exchange, "all_reduce": lambda: group.all_reduce(next(summed))}
    return calls | {"add": add} if group is world.world_group else calls


def _build_passing_program(num_ranks: int, times: int) -> Program:
    """Build a program in which every rank of an even number sends a chunk to the next and receives one, `times` times; nothing is added."""
    pieces = [Value("chunk", (i,)) for i in range(2 * times)]
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        row: list[Action] = []
        for i in range(times):
            sent, received = pieces[2 * i + rank % 2], pieces[2 * i + 1 - rank % 2]
            row += [Send(sent, after), Recv(received, before)]
        rows.append(tuple(row))
    initial = tuple({piece: {rank: 1} for piece in pieces} for rank in range(num_ranks))
    return Program("passing", 0, initial, tuple(rows), ({},) * num_ranks)


def _time_calls(world: Any, calls: Mapping[str, Callable[[], object]], samples: int, warm_s: float) -> dict[str, list[float]]:
    """Return the seconds of each call, of the slowest rank each time, after a warm-up: calls of microseconds take half as long again until
    the interpreter has run them often.

    The calls take turns: a disturbance affects few samples of each, and each finds the others' data in the caches, as in training, and
    not its own.
    """

    def once(call: Callable[[], object]) -> float:
        world.world_group.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def slowest(seconds: list[float]) -> list[float]:
        maxima = torch.tensor(seconds, dtype=torch.float64)
        world.world_group.all_reduce(maxima, op="max")
        return maxima.tolist()

    for call, spent in zip(calls.values(), slowest([once(call) for call in calls.values()]), strict=True):
        for _ in range(min(WARM, int(warm_s / spent))):
            once(call)
    rounds = [slowest([once(call) for call in calls.values()]) for _ in range(samples)]
    return dict(zip(calls, map(list, zip(*rounds, strict=True)), strict=True))
