"""What ranks tell one another, timed. In: a world. Out: seconds by bytes, as tables that `weft.cost.collectives` reads. [torch]"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch

from weft.cluster.probe.timing import Patience, spread
from weft.collectives import ALGORITHMS, build
from weft.plan.program import Action, Program, Recv, Send, Value

SIZES = tuple(4**k << 10 for k in range(1, 8))  # 4 KiB to 16 MiB: between points a straight line in logarithms must do
FULL_SIZES = (1 << 10, *SIZES, 64 << 20)
PIECES = 4
WARM, WARM_S = 40, 0.01  # calls before those that count, at most, and about how long they take
LARGE = 4 << 20  # bytes from which on a call takes milliseconds, and half of the samples must do
QUICK = Patience(least=4, most=8, spread=0.1)
FULL = Patience(least=6, most=30, spread=0.03)
Pieces = Sequence[torch.Tensor]
Points = list[tuple[int, float]]


def measure_messages(world: Any, quick: bool = True) -> list[tuple[str, int, Points]]:
    """Tables of what collectives as programs are made of, over shared memory and over gloo (`.gloo`), all ranks at once.

    `send`: half of the ranks send to the others; `exchange`: each sends to the next and receives from the one before; `add`: each adds what
    it has; `all_reduce`: the transport's own. `call` and `step`, of one size: what running a program costs, and each of its messages,
    beyond those. `program.NAME`: whole all-reduces by programs, of every second size. Times are of the slowest rank. Large tensors come
    first: rings, windows and pages are then as in a long run.
    """
    from weft.world.running import Programs
    from weft.world.world import World

    n = world.num_ranks
    over_gloo = World(world.rank, n, world._store, generation=1, transport="gloo")
    tables: dict[str, Points] = {}
    sizes, patience = (SIZES, QUICK) if quick else (FULL_SIZES, FULL)
    room = [torch.zeros(2 * sizes[-1] // 4) for _ in range(2)]  # of 2 pieces of the largest, for all: its pages are there from then on
    whole = {name: build("all_reduce", name, n) for name in ALGORITHMS["all_reduce"] if name != "hierarchical"}
    for end, group in (("", world.everyone), (".gloo", over_gloo.everyone)):
        calls, programs = _calls(world, group), Programs(group.runner)
        if end:
            calls.pop("add")
        for program in whole.values():  # the programs' own connections: pages of all of them are there from then on
            programs.all_reduce(program, room[0][: sizes[-1] // 4])
        for number, size in reversed(list(enumerate(sizes))):
            # Programs and buckets of gradients go through memory: a piece that is sent again and again would stay in a core's own cache.
            count = PIECES if size < sizes[-1] else 2
            x, y = (whole[: count * size // 4].view(count, -1).unbind() for whole in room)
            few = replace(patience, least=patience.least // 2 + 1, most=patience.most // 2 + 1) if size >= LARGE else patience
            cases: dict[str, Callable[[], object]] = {name: partial(call, x, y) for name, call in calls.items()}
            summed = cycle(x)
            cases["all_reduce"] = lambda summed=summed, group=group: group.all_reduce(next(summed))  # type: ignore[misc]
            if number % 2 == 0:
                for name, program in whole.items():
                    cases[f"program.{name}"] = partial(programs.all_reduce, program, x[0])
            parts = {"send": 0.5 / count, "exchange": 1 / count, "add": 1 / count}
            for name, seconds in _typical(world, cases, few).items():
                tables.setdefault(name + end, []).insert(0, (size, seconds * parts.get(name, 1.0)))
        least, few_times, many_times = sizes[0], 1, 5
        small = torch.zeros(least // 4)
        passed = {str(times): partial(programs.all_reduce, _passing(n, times), small) for times in (few_times, many_times)}
        few_s, many_s = _typical(world, passed, patience).values()
        message = max(0.0, (many_s - few_s) / (many_times - few_times))
        tables[f"step{end}"] = [(least, max(0.0, message - tables[f"exchange{end}"][0][1]))]
        tables[f"call{end}"] = [(least, max(0.0, few_s - few_times * message))]
    return [(name, n, points) for name, points in tables.items()]


def _calls(world: Any, group: Any) -> dict[str, Callable[[Pieces, Pieces], None]]:
    """What is timed between the members of `group`, which are all of the world: from pieces `x` to pieces `y`."""
    n, index = group.size, group.index
    half = n // 2

    def send(x: Pieces, y: Pieces) -> None:
        for leaves, comes in zip(x, y, strict=True):
            (group.isend(leaves, index + half) if index < half else group.irecv(comes, index - half)).wait()
            (group.irecv(comes, index + half) if index < half else group.isend(leaves, index - half)).wait()

    def exchange(x: Pieces, y: Pieces) -> None:
        for leaves, comes in zip(x, y, strict=True):
            arriving, leaving = group.irecv(comes, (index - 1) % n), group.isend(leaves, (index + 1) % n)
            arriving.wait()
            leaving.wait()

    def add(x: Pieces, y: Pieces) -> None:
        for one, other in zip(x, y, strict=True):
            torch.add(one, other, out=one)
        if n > 2:
            world.everyone.barrier()  # ranks that have no core yet are waited for

    return {"send": send, "exchange": exchange, "add": add}


def _passing(num_ranks: int, times: int) -> Program:
    """Every rank of an even number sends a piece to the next and takes one from the one before, `times` times; nothing is added."""
    pieces = [Value("chunk", (i,)) for i in range(2 * times)]
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        row: list[Action] = []
        for i in range(times):
            own, other = pieces[2 * i + rank % 2], pieces[2 * i + 1 - rank % 2]
            row += [Send(own, after), Recv(other, before)]
        rows.append(tuple(row))
    given = tuple({piece: {rank: 1} for piece in pieces} for rank in range(num_ranks))
    return Program("passing", 0, given, tuple(rows), ({},) * num_ranks)


def _typical(world: Any, calls: Mapping[str, Callable[[], object]], patience: Patience) -> dict[str, float]:
    """Median seconds of each call of all ranks, each time the slowest one's; after some that do not count: what takes microseconds takes
    half as long again until the interpreter has seen it often.

    The calls take turns: what slows the machine for a moment slows few samples of each, and each finds in the caches what the others left
    there, as in training, and not what it left itself. All ranks see the same times, and so take as many.
    """

    def once(call: Callable[[], object]) -> float:
        world.everyone.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def slowest(seconds: list[float]) -> list[float]:
        told = torch.tensor(seconds, dtype=torch.float64)
        world.everyone.all_reduce(told, op="max")
        return told.tolist()

    for call, spent in zip(calls.values(), slowest([once(call) for call in calls.values()]), strict=True):
        for _ in range(min(WARM, int(WARM_S / spent))):
            once(call)
    times: dict[str, list[float]] = {name: [] for name in calls}
    unknown = list(calls)
    while unknown and len(times[unknown[0]]) < patience.most:
        for _ in range(patience.least):
            for name, spent in zip(unknown, slowest([once(calls[name]) for name in unknown]), strict=True):
                times[name].append(spent)
        unknown = [name for name in unknown if spread(times[name]) > patience.spread]
    return {name: median(found) for name, found in times.items()}
