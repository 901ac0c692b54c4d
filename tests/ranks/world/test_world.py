"""Collectives against closed forms: inputs that differ per rank, uneven pieces, all dtypes, subsets, generations, messages."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.errors import Infeasible, RankError, UsageError
from shardwise.plan.ir.placement import even_shard_range
from shardwise.world import private
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")


def loops(world: World, folder: str) -> list[int]:
    """How the threads are scheduled that a gloo group has: its device's loop, and those that carry collectives out."""
    again, before = World(world.rank, 2, private.file_store(f"{folder}/loops", 2), transport="gloo"), private.thread_ids()
    again.world_group.all_reduce(torch.ones(4))
    return sorted(map(os.sched_getscheduler, private.thread_ids() - before))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has batch threads")
def test_loops_of_gloo_wait_for_the_threads_that_they_need(ranks: Any, tmp_path: Path) -> None:
    assert ranks(loops, 2, str(tmp_path)) == [[os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_BATCH]] * 2


def whole(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers 0, 1, 2 ... in rows, modulo 5 so that sums of a few are exact in bfloat16."""
    return (torch.arange(torch.Size(shape).numel()) % 5).reshape(shape).to(dtype)


def mine(x: Tensor, dim: int, world: World) -> Tensor:
    """This rank's piece; along dimension 1 and later it is not contiguous."""
    return x.narrow(dim, *even_shard_range(x.shape[dim], world.num_ranks, world.rank))


def collectives(world: World, name: str) -> None:
    dtype = getattr(torch, name)
    group, n, rank = world.world_group, world.num_ranks, world.rank

    def summand(i: int) -> Tensor:
        return (whole(5, 7) + i).to(dtype) if dtype is not torch.bool else (whole(5, 7) + i).remainder(4).eq(0)

    total = (
        sum((summand(i) for i in range(1, n)), summand(0))
        if dtype is not torch.bool
        else torch.stack([summand(i) for i in range(n)]).any(0)
    )
    assert isinstance(total, Tensor)
    for given in (summand(rank), summand(rank).t().contiguous().t()):
        group.all_reduce(given)
        assert torch.equal(given, total)
    given = summand(rank)
    work = group.all_reduce(given, op="max", wait=False)
    work.wait()
    work.wait()
    assert torch.equal(given, torch.stack([summand(i) for i in range(n)]).amax(0))
    for dim in (0, 1):
        for shape in ((5, 7), (2, 3), (1, 1), (2 * n, 2 * n)):
            full = whole(*shape, dtype=dtype)
            assert torch.equal(group.all_gather(mine(full, dim, world), dim, shape[dim]), full)
        assert torch.equal(group.all_gather(mine(whole(2 * n, 2 * n, dtype=dtype), dim, world), dim - 2), whole(2 * n, 2 * n, dtype=dtype))
        assert torch.equal(group.reduce_scatter(summand(rank), dim), mine(total, dim, world))
        full = whole(5, 3, 7, dtype=dtype)
        there = group.all_to_all(mine(full, 0, world), 2, 0, 5)
        assert torch.equal(there, mine(full, 2, world))
        assert torch.equal(group.all_to_all(there, 0, -1, 7), mine(full, 0, world))
    for source in range(n):
        given = summand(rank)[:, 1:]
        group.broadcast(given, source)
        assert torch.equal(given, summand(source)[:, 1:])
    out = torch.empty(3 * n, dtype=dtype)
    later = [group.all_gather_into(out, summand(rank).flatten()[:3].clone(), wait=False)]
    part = torch.empty(4, dtype=dtype)
    summands = [summand(i).flatten()[:1].expand(4 * n).contiguous() for i in range(n)]
    if dtype is not torch.bool:
        later.append(group.reduce_scatter_into(part, summands[rank], wait=False))
    for one in later:
        one.wait()
    assert torch.equal(out, torch.cat([summand(i).flatten()[:3] for i in range(n)]))
    if dtype is not torch.bool:
        assert torch.equal(part, torch.stack(summands).sum(0, dtype=dtype)[:4])
    got = group.exchange([torch.full((rank + 1, i), rank + 10 * i).to(dtype) for i in range(n)], [(i + 1, rank) for i in range(n)])
    for i, x in enumerate(got):
        assert torch.equal(x, torch.full((i + 1, rank), i + 10 * rank).to(dtype))
    group.barrier()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_collectives_equal_their_closed_forms(ranks: Any, name: str, num_ranks: int) -> None:
    ranks(collectives, num_ranks, name)


def narrow_sum(world: World) -> list[float]:
    # 256 + 1 is no bfloat16: added one after the other in bfloat16 the ones are lost.
    x = torch.tensor([256.0 if world.rank == 0 else 1.0], dtype=torch.bfloat16)
    world.world_group.all_reduce(x)
    y = torch.tensor([256.0 if world.rank == 0 else 1.0] * 3, dtype=torch.bfloat16)
    return [float(x), float(world.world_group.reduce_scatter(y))]


def test_bfloat16_sums_are_rounded_once(ranks: Any) -> None:
    assert ranks(narrow_sum, 3) == [[258.0, 258.0]] * 3


def subsets(world: World) -> list[float]:
    """Rank 2 takes part in none of the pairs that it is not in; the order of a group's ranks is its own."""
    found = []
    for pair in ((0, 1), (3, 1), (0, 3)):
        if world.rank in pair:
            x = torch.tensor([float(world.rank)])
            world.group(pair).all_reduce(x)
            found.append(float(x))
            gathered = world.group(pair).all_gather(torch.tensor([float(world.rank)]))
            assert gathered.tolist() == [float(rank) for rank in pair]
    assert world.group((0, 1)) is world.group([0, 1]) if world.rank < 2 else True
    with pytest.raises(UsageError, match=f"rank {world.rank} of 4 cannot join"):
        world.group([(world.rank + 1) % 4])
    return found


def test_a_group_needs_its_members_only(ranks: Any) -> None:
    assert ranks(subsets, 4) == [[1.0, 3.0], [1.0, 4.0], [], [4.0, 3.0]]


def messages(world: World) -> None:
    """Both ways at once, several under way, tags out of order, equal tags in order."""
    group, other = world.world_group, 1 - world.rank
    sends = [group.isend(torch.full((2, 3), 10.0 * world.rank + i).t(), other, tag=i) for i in range(4)]
    sends += [group.isend(torch.full((1,), 100 + i), other, tag=9) for i in range(3)]
    rooms = {i: torch.zeros(2, 3).t() for i in (3, 1, 0, 2)}
    receives = [group.irecv(room, other, tag=i) for i, room in rooms.items()]
    same = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    receives += [group.irecv(room, other, tag=9) for room in same]
    for work in receives + sends:
        work.wait()
    for i, room in rooms.items():
        assert torch.equal(room, torch.full((3, 2), 10.0 * other + i))
    assert [int(x) for x in same] == [100, 101, 102]
    flag = torch.zeros(3, dtype=torch.bool)
    work = group.irecv(flag, other)
    group.isend(torch.tensor([True, False, True]), other).wait()
    work.wait()
    assert flag.tolist() == [True, False, True]


def test_messages_match_by_tag_then_by_order(ranks: Any) -> None:
    ranks(messages, 2)


def two_generations(world: World, folder: str) -> list[float]:
    """The same store and the same ranks under two generations: neither sees the other's addresses."""
    store = private.file_store(f"{folder}/both", 2)
    found = []
    for generation in (0, 1):
        again = World(world.rank, 2, store, generation=generation)
        x = torch.tensor([float(world.rank + 10 * generation)])
        again.world_group.all_reduce(x)
        found.append(float(x))
    return found


def test_generations_do_not_mix(ranks: Any, tmp_path: Path) -> None:
    assert ranks(two_generations, 2, str(tmp_path)) == [[1.0, 21.0]] * 2


def stale(world: World, folder: str) -> str:
    """Without a generation of its own, a second attempt would read the first one's addresses: the broken twin of the test above."""
    store = private.file_store(f"{folder}/stale", 2)
    World(world.rank, 2, store).world_group.barrier()
    # Rank 0 comes first and finds the address that rank 1 had. It connects to it, or waits for rank 1: gloo decides by the ports.
    for _ in range(12):
        time.sleep(0.1 * world.rank)
        try:
            World(world.rank, 2, store, timeout_s=1.0).world_group.barrier()
        except Exception as error:
            return type(error).__name__
    return ""


def test_one_generation_twice_fails(ranks: Any, tmp_path: Path) -> None:
    # One rank may get as far as the collective, which then fails on the other: either way it does not go unseen.
    with suppress(RankError):
        assert any(ranks(stale, 2, str(tmp_path)))


def agreed(world: World) -> list[int]:
    return world.all_reduce_max([world.rank, -world.rank, 7 if world.rank == 1 else -1])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_maximum(ranks: Any, num_ranks: int) -> None:
    assert ranks(agreed, num_ranks) == [[num_ranks - 1, 0, 7 if num_ranks > 1 else -1]] * num_ranks


def told(world: World) -> list[str]:
    def choose() -> str:
        assert world.rank == 0
        return "first"

    def refuse() -> str:
        raise Infeasible("9 layers and 10 stages")

    said = [world.broadcast_text(choose)]
    try:
        world.broadcast_text(refuse)
    except Infeasible as error:
        said.append(str(error))
    return [*said, world.broadcast_text(lambda: "third")]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_rank_0_chooses_for_all_and_fails_for_all(ranks: Any, num_ranks: int) -> None:
    assert ranks(told, num_ranks) == [["first", "9 layers and 10 stages", "third"]] * num_ranks


def plans(world: World) -> list[str]:
    """Machines that would lead each rank to a plan of its own: slow links on rank 0, fast ones on the others."""
    link = NetworkLink(1e-3, 1e6) if world.rank == 0 else NetworkLink(1e-9, 1e13)
    core = Device("core", "cpu", (("float32", 1e9),), 8e9, 2e10)
    engine = shardwise.parallelize("gpt-tiny", 8, cluster=Cluster("mine", core, (ClusterLevel("node", 2, link),)), world=world, seed=0)
    return [str(engine.plan.layout), str(engine.step(resolve("gpt-tiny").batch(8)).loss)]


def test_ranks_that_measured_other_machines_train_under_one_plan(ranks: Any) -> None:
    (one, other) = ranks(plans, 2)
    assert one == other


def wrong_calls(world: World) -> list[str]:
    group = world.world_group
    said = []
    for call in (
        lambda: group.all_gather(torch.zeros(3), 0, 4),
        lambda: group.all_to_all(torch.zeros(2, 2), 1, 1),
        lambda: group.exchange([torch.zeros(1)], [(1,)]),
        lambda: group.isend(torch.zeros(1), group.index),
        lambda: group.all_gather_into(torch.zeros(3), torch.zeros(2)),
    ):
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    return said


def test_wrong_calls_are_refused_before_anything_is_sent(ranks: Any) -> None:
    said = ranks(wrong_calls, 2)[1]
    assert said[0] == "member 1 of 2 has 3 of a dimension of 4; its piece is 2"
    assert len(said) == 5


def test_a_world_of_one_needs_nothing() -> None:
    world = World()
    x = torch.arange(6.0).reshape(2, 3)
    group = world.world_group
    group.all_reduce(x)
    group.barrier()
    assert torch.equal(group.all_gather(x, 1), x)
    assert torch.equal(group.reduce_scatter(x, 1), x)
    assert torch.equal(group.all_to_all(x, 0, 1), x)
    assert world.recorder.last() is None
    with pytest.raises(UsageError, match="need a store"):
        World(0, 2)
