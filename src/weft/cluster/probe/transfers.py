"""What ranks tell one another, timed. In: a world. Out: seconds by bytes, as tables that `weft.cost.network.collectives` reads. [torch]"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch

from weft.collectives import ALGORITHMS, build
from weft.plan.program import Action, Program, Recv, Send, Value

SIZES = tuple(4**k << 10 for k in range(1, 8))  # 4 KiB to 16 MiB: between points a straight line in logarithms must do
FULL_SIZES = (1 << 10, *SIZES, 64 << 20)
PIECES = 4
WARM, WARM_S, AGAIN_S = 40, 0.01, 0.002  # calls before those that count, at most, and about how long they take, first and later
PASSES = 3  # over all sizes: processors that are far from each other for a second then spoil a third of a size's samples, not all
QUICK, FULL = 2, 6  # samples of a pass
FEW, MANY = 1, 5  # pieces passed on, by whose difference a message is known
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
    sizes, samples = (SIZES, QUICK) if quick else (FULL_SIZES, FULL)
    room = [torch.zeros(2 * sizes[-1] // 4) for _ in range(2)]  # of 2 pieces of the largest, for all: its pages are there from then on
    ends = {"": world.everyone, ".gloo": over_gloo.everyone}
    programs = {end: Programs(group.runner) for end, group in ends.items()}
    by_name = {name: build("all_reduce", name, n) for name in ALGORITHMS["all_reduce"] if name != "hierarchical"}
    passing = {count: _passing(n, count) for count in (FEW, MANY)}
    for runner in programs.values():  # the programs' own connections: pages of all of them are there from then on
        for program in by_name.values():
            runner.all_reduce(program, room[0][: sizes[-1] // 4])
    times: dict[tuple[str, int], list[float]] = {}
    for warm_s in (WARM_S, *[AGAIN_S] * (PASSES - 1)):
        for end, group in ends.items():
            for size in reversed(sizes):
                # Programs and buckets of gradients go through memory: a piece sent again and again would stay in a core's own cache.
                count = PIECES if size < sizes[-1] else 2
                x, y = (half[: count * size // 4].view(count, -1).unbind() for half in room)
                run = {f"program.{name}": program for name, program in by_name.items() if size in sizes[::2]}
                run |= {f"passing.{again}": program for again, program in passing.items() if size == sizes[0]}
                cases = _calls(world, group, x, y)
                cases |= {name: partial(programs[end].all_reduce, program, x[0]) for name, program in run.items()}
                parts = {"send": 0.5 / count, "exchange": 1 / count, "add": 1 / count}
                for name, samples_s in _timed(world, cases, samples, warm_s).items():
                    times.setdefault((name + end, size), []).extend(parts.get(name, 1.0) * seconds for seconds in samples_s)
    typical = {key: median(samples_s) for key, samples_s in times.items()}
    tables: dict[str, Points] = {}
    for end in ends:
        few_s, many_s = (typical.pop((f"passing.{count}{end}", sizes[0])) for count in passing)
        message = max(0.0, (many_s - few_s) / (MANY - FEW))
        tables[f"step{end}"] = [(sizes[0], max(0.0, message - typical[f"exchange{end}", sizes[0]]))]
        tables[f"call{end}"] = [(sizes[0], max(0.0, few_s - FEW * message))]
    for (name, size), seconds in sorted(typical.items()):
        tables.setdefault(name, []).append((size, seconds))
    return [(name, n, points) for name, points in tables.items()]


def _calls(world: Any, group: Any, x: Pieces, y: Pieces) -> dict[str, Callable[[], object]]:
    """What is timed between the members of `group`, which are all of the world: from pieces `x` to pieces `y`."""
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
        for one, other in zip(x, y, strict=True):
            torch.add(one, other, out=one)
        if n > 2:
            world.everyone.barrier()  # ranks that have no core yet are waited for

    calls = {"send": send, "exchange": exchange, "all_reduce": lambda: group.all_reduce(next(summed))}
    return calls | {"add": add} if group is world.everyone else calls


def _passing(num_ranks: int, times: int) -> Program:
    """Every rank of an even number sends a piece to the next and takes one from the one before, `times` times; nothing is added."""
    pieces = [Value("chunk", (i,)) for i in range(2 * times)]
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        row: list[Action] = []
        for i in range(times):
            mine, other = pieces[2 * i + rank % 2], pieces[2 * i + 1 - rank % 2]
            row += [Send(mine, after), Recv(other, before)]
        rows.append(tuple(row))
    initial = tuple({piece: {rank: 1} for piece in pieces} for rank in range(num_ranks))
    return Program("passing", 0, initial, tuple(rows), ({},) * num_ranks)


def _timed(world: Any, calls: Mapping[str, Callable[[], object]], samples: int, warm_s: float) -> dict[str, list[float]]:
    """Seconds of each call of all ranks, each time the slowest one's; after some that do not count: what takes microseconds takes half as
    long again until the interpreter has seen it often.

    The calls take turns: what slows the machine for a moment slows few samples of each, and each finds in the caches what the others left
    there, as in training, and not what it left itself.
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
        for _ in range(min(WARM, int(warm_s / spent))):
            once(call)
    rounds = [slowest([once(call) for call in calls.values()]) for _ in range(samples)]
    return dict(zip(calls, map(list, zip(*rounds, strict=True)), strict=True))
