"""Collectives that run from their programs, against sums that each rank works out alone, over gloo and shared memory.

Every rank draws the inputs of all ranks from the same seeds, so it knows the results. Numbers are small and whole where they are compared
exactly, so that the order of adding does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.collectives import ALGORITHMS, NESTED, build
from weft.plan.placement import piece
from weft.plan.program import Program
from weft.world.running import Programs
from weft.world.world import World

KINDS = ("gloo", "shared_memory")
SIZES = (0, 1, 2, 13, 1009)
LEVELS = {1: [[1]], 2: [[2]], 3: [[3, 1]], 4: [[2, 2]], 5: [[5]], 6: [[3, 2], [2, 3]], 7: [[7]], 8: [[2, 2, 2], [4, 2]]}


def whole(seed: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` brings: whole numbers that every type holds exactly, sums of eight of them too."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    return torch.randint(0, 15, (numel,), generator=generator).to(dtype)


def programs_of(collective: str, num_ranks: int) -> list[Program]:
    """Every algorithm, in every nesting, that does this with so many ranks."""
    found = []
    for name in ALGORITHMS[collective]:
        if name in ("halving", "doubling") and num_ranks & (num_ranks - 1):
            continue
        if name == "two_level":
            shapes: Sequence[Any] = [[k, num_ranks // k] for k in range(1, num_ranks + 1) if num_ranks % k == 0]
        else:
            shapes = LEVELS[num_ranks] if name in NESTED else [num_ranks]
        found += [build(collective, name, shape) for shape in shapes]
    return found


def everything(world: World, kind: str, dtypes: Sequence[str], sizes: Sequence[int]) -> None:
    group, n, me = world.everyone, world.num_ranks, world.rank
    running = Programs(group.runner)
    programs = {collective: programs_of(collective, n) for collective in ALGORITHMS if collective != "halo"}
    for name in dtypes:
        dtype = getattr(torch, name)
        for seed, numel in enumerate(sizes):
            parts = [whole(seed, r, numel, dtype) for r in range(n)]
            total = torch.stack([part.to(torch.float64) for part in parts]).sum(0).to(dtype)
            cut = [slice(start, start + length) for start, length in (piece(numel, n, r) for r in range(n))]
            for program in programs["all_reduce"]:
                x = parts[me].clone()
                running.all_reduce(program, x)
                assert torch.equal(x, total), (program.name, numel, name)
            for program in programs["reduce_scatter"]:
                out, x = torch.empty(cut[me].stop - cut[me].start, dtype=dtype), parts[me].clone()
                running.reduce_scatter(program, out, x)
                assert torch.equal(out, total[cut[me]]), (program.name, numel, name)
                assert torch.equal(x, parts[me])
            for program in programs["all_gather"]:
                out = torch.empty(numel, dtype=dtype)
                running.all_gather(program, out, parts[0][cut[me]].clone())
                assert torch.equal(out, parts[0]), (program.name, numel, name)
            for program in programs["broadcast"]:
                x = parts[me].clone()
                running.broadcast(program, x)
                assert torch.equal(x, parts[0]), (program.name, numel, name)
            for program in programs["all_to_all"]:
                sent = [whole(50 * me + t, 0, (numel + me + 2 * t) % 9, dtype) for t in range(n)]
                got = running.exchange(program, sent, [((numel + s + 2 * me) % 9,) for s in range(n)])
                assert all(torch.equal(x, whole(50 * s + me, 0, (numel + s + 2 * me) % 9, dtype)) for s, x in enumerate(got)), program.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_every_algorithm_with_every_size(ranks: Any, kind: str, num_ranks: int) -> None:
    ranks(everything, num_ranks, kind, ["float32"], SIZES, env={"WEFT_TRANSPORT": kind})


@pytest.mark.parametrize("kind", [*KINDS, "portable"])
def test_every_type(ranks: Any, kind: str) -> None:
    dtypes = ["float64", "bfloat16", "float16", "int64", "int32", "uint8"]
    ranks(everything, 3, kind, dtypes, (0, 2, 257), env={"WEFT_TRANSPORT": kind})
