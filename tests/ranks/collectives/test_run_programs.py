"""Collectives that run from their programs, against sums that each rank works out alone, over gloo and shared memory.

Every rank draws the inputs of all ranks from the same seeds, so it knows the results. Numbers are small and whole where they are compared
exactly, so that the order of adding does not matter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.collectives import ALGORITHMS, NESTED, build
from shardwise.plan.ir.placement import even_shard_range
from shardwise.plan.ir.program import Program
from shardwise.world.comm.runner import runner_of
from shardwise.world.comm.running import ProgramRunner
from shardwise.world.world import World

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
    group, n, me = world.world_group, world.num_ranks, world.rank
    running = ProgramRunner(runner_of(group))
    programs = {collective: programs_of(collective, n) for collective in ALGORITHMS if collective != "halo"}
    for name in dtypes:
        dtype = getattr(torch, name)
        for seed, numel in enumerate(sizes):
            parts = [whole(seed, r, numel, dtype) for r in range(n)]
            total = torch.stack([part.to(torch.float64) for part in parts]).sum(0).to(dtype)
            cut = [slice(start, start + length) for start, length in (even_shard_range(numel, n, r) for r in range(n))]
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
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_algorithm_with_every_size(ranks: Any, kind: str, num_ranks: int) -> None:
    ranks(everything, num_ranks, kind, ["float32"], SIZES if num_ranks < 6 else SIZES[::2], env={"SHARDWISE_TRANSPORT": kind})


@pytest.mark.parametrize("kind", KINDS)
def test_every_type(ranks: Any, kind: str) -> None:
    dtypes = ["float64", "bfloat16", "float16", "int64", "int32", "uint8"]
    ranks(everything, 3, kind, dtypes, (0, 2, 257), env={"SHARDWISE_TRANSPORT": kind})


def in_flight(world: World, kind: str) -> bool:
    """Sums of many sizes under way at once, by several programs, while the group itself is used; waited for in any order."""
    group, n, me = world.world_group, world.num_ranks, world.rank
    running = ProgramRunner(runner_of(group))
    known = programs_of("all_reduce", n)
    drawn, own = random.Random(7), random.Random(me)
    under_way: list[tuple[Any, Tensor, Tensor]] = []
    for seed in range(40):
        numel, program = drawn.choice((1, 30, 5000, 100_000)), drawn.choice(known)
        x = whole(seed, me, numel, torch.float32)
        under_way.append((running.all_reduce(program, x, wait=False), x, sum(whole(seed, r, numel, torch.float32) for r in range(n))))  # type: ignore[arg-type]
        if seed % 7 == 0:
            y = torch.full((3,), float(me))
            group.all_reduce(y)
            assert y.eq(sum(range(n))).all()
    done = under_way[0][0].is_done
    own.shuffle(under_way)
    for work, got, expected in under_way:
        work.wait()
        assert work.is_done
        assert torch.equal(got, expected)
    return isinstance(done, bool)


@pytest.mark.parametrize("kind", KINDS)
def test_many_in_flight_at_once(ranks: Any, kind: str) -> None:
    assert all(ranks(in_flight, 3, kind, env={"SHARDWISE_TRANSPORT": kind}))


def same_bits(world: World, numel: int) -> list[list[float]]:
    """Sums of numbers whose sum depends on the order of adding, by every program."""
    running = ProgramRunner(runner_of(world.world_group))
    found = []
    for program in programs_of("all_reduce", world.num_ranks):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(world.rank)) * 10.0 ** (world.rank * 3)
        running.all_reduce(program, x)
        found.append(x.tolist())
    return found


@pytest.mark.parametrize("num_ranks", [3, 6])
def test_all_ranks_have_the_same_bits(ranks: Any, num_ranks: int) -> None:
    told = ranks(same_bits, num_ranks, 101, env={"SHARDWISE_TRANSPORT": "gloo"})
    assert all(one == told[0] for one in told)


def rounded_once(world: World) -> None:
    """Summands that bfloat16 would lose one by one."""
    running = ProgramRunner(runner_of(world.world_group))
    for program in programs_of("all_reduce", world.num_ranks):
        x = torch.full((5,), 256.0 if world.rank == 0 else 0.75, dtype=torch.bfloat16)
        running.all_reduce(program, x)
        assert x.eq(torch.tensor(256.0 + 0.75 * (world.num_ranks - 1)).to(torch.bfloat16)).all(), program.name


def test_narrow_types_are_rounded_once(ranks: Any) -> None:
    assert torch.tensor(256.75).to(torch.bfloat16) == 256.0
    ranks(rounded_once, 5, env={"SHARDWISE_TRANSPORT": "shared_memory"})


SWAP = """
given 0: chunk(0)=0
given 1: chunk(0)=1
wants 0: chunk(0)=1
wants 1: chunk(0)=0
rank 0: chunk(0)>1 chunk(0)<1
rank 1: chunk(0)>0 chunk(0)<0
"""


def swapped(world: World) -> list[float]:
    x = torch.full((70_000,), float(world.rank))
    ProgramRunner(runner_of(world.world_group)).all_reduce(Program.parse(SWAP), x)
    return sorted(set(x.tolist()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_of_ones_own_that_overwrites_what_it_sends(ranks: Any, kind: str) -> None:
    assert ranks(swapped, 2, env={"SHARDWISE_TRANSPORT": kind}) == [[1.0], [0.0]]


def bordered(world: World, grid: tuple[int, int], width: int) -> None:
    """A tile of an image with margins, filled from the neighbours; corners come along."""
    rows, columns = grid
    full = torch.arange(rows * 6 * columns * 8, dtype=torch.float64).view(rows * 6, columns * 8)
    i, j = divmod(world.rank, columns)
    padded = torch.nn.functional.pad(full, (width,) * 4, value=-1.0)
    wanted = padded[6 * i : 6 * i + 6 + 2 * width, 8 * j : 8 * j + 8 + 2 * width]
    tile = torch.full_like(wanted, -1.0)
    tile[width:-width, width:-width] = full[6 * i : 6 * i + 6, 8 * j : 8 * j + 8]
    inner = slice(width, -width)
    sent = {(0, 0): tile[width : 2 * width, inner], (0, 1): tile[-2 * width : -width, inner]}
    taken = {(0, 0): tile[:width, inner], (0, 1): tile[-width:, inner]}
    sent |= {(1, 0): tile[:, width : 2 * width], (1, 1): tile[:, -2 * width : -width]}
    taken |= {(1, 0): tile[:, :width], (1, 1): tile[:, -width:]}
    ProgramRunner(runner_of(world.world_group)).halo(build("halo", "exchange", list(grid)), sent, taken)
    assert torch.equal(tile, wanted)


@pytest.mark.parametrize("grid", [(2, 2), (3, 1), (2, 3)])
def test_halos_with_their_corners(ranks: Any, grid: tuple[int, int]) -> None:
    ranks(bordered, grid[0] * grid[1], grid, 2, env={"SHARDWISE_TRANSPORT": "gloo"})
