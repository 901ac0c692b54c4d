"""What ranks tell one another, timed. In: a world. Out: seconds by bytes, as tables that `weft.cost.collectives` reads. [torch]"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
    beyond those. `program.NAME`: whole all-reduces by programs, of every second size that takes microseconds. Times are of the slowest
    rank. Large tensors come first: rings, windows and pages are then as in a long run.
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
        calls = _calls(world, group)
        for size in reversed(sizes):
            # Programs and buckets of gradients go through memory: a piece that is sent again and again would stay in a core's own cache.
            count = PIECES if size < sizes[-1] else 2
            x, y = (whole[: count * size // 4].view(count, -1).unbind() for whole in room)
            few = replace(patience, least=patience.least // 2, most=patience.most // 2) if size >= LARGE else patience
            for name, call in calls.items():
                if name != "add" or not end:
                    part = (0.5 if name == "send" else 1.0) / count
                    tables.setdefault(name + end, []).insert(0, (size, part * _typical(world, call, few, x, y)))
        least, programs = sizes[0], Programs(group.runner)
        for program in whole.values():  # the programs' own connections: pages of all of them are there from then on
            programs.all_reduce(program, room[0][: sizes[-1] // 4])
        long = replace(patience, least=2 * patience.least, most=2 * patience.most)
        for size in (size for size in reversed(sizes[::2]) if size < LARGE):
            for name, program in whole.items():
                summed = partial(programs.all_reduce, program)
                tables.setdefault(f"program.{name}{end}", []).insert(0, (size, _typical(world, summed, long, room[0][: size // 4])))
        small, few_times, many_times, seconds = torch.zeros(least // 4), 1, 5, []
        for times in (few_times, many_times):
            program = _passing(n, times)
            seconds.append(_typical(world, lambda x, program=program, programs=programs: programs.all_reduce(program, x), patience, small))
        message = max(0.0, (seconds[1] - seconds[0]) / (many_times - few_times))
        tables[f"step{end}"] = [(least, max(0.0, message - tables[f"exchange{end}"][0][1]))]
        tables[f"call{end}"] = [(least, max(0.0, seconds[0] - few_times * message))]
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

    def reduce(x: Pieces, y: Pieces) -> None:
        for piece in x:
            group.all_reduce(piece)

    def add(x: Pieces, y: Pieces) -> None:
        for one, other in zip(x, y, strict=True):
            torch.add(one, other, out=one)
        if n > 2:
            world.everyone.barrier()  # ranks that have no core yet are waited for

    return {"send": send, "exchange": exchange, "all_reduce": reduce, "add": add}


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


def _typical(world: Any, call: Callable[..., Any], patience: Patience, *inputs: Any) -> float:
    """Median seconds of a call of all ranks, each time the slowest one's; after some that do not count: what takes microseconds takes half
    as long again until the interpreter has seen it often.

    All ranks see the same times, and so take as many.
    """

    def once() -> float:
        world.everyone.barrier()
        start = time.perf_counter()
        call(*inputs)
        return time.perf_counter() - start

    begun = time.perf_counter()
    once()
    spent = torch.tensor([time.perf_counter() - begun])
    world.everyone.all_reduce(spent, op="max")  # all ranks warm up as often
    for _ in range(min(WARM, int(WARM_S / float(spent)))):
        once()
    times: list[float] = []
    while len(times) < patience.most and spread(times) > patience.spread:
        slowest = torch.tensor([once() for _ in range(patience.least)])
        world.everyone.all_reduce(slowest, op="max")
        times += slowest.tolist()
    return median(times)
