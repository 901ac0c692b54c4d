"""Groups at their edges: closed ones, numbers that are none, tensors without dimensions. Over every transport."""

from __future__ import annotations

import gc
import math
import os
import time
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import RankError, RunError, UsageError
from shardwise.plan.ir.placement import even_shard_range
from shardwise.world.comm.group import Group
from shardwise.world.comm.pending import LostPeer, _describe_users_call
from shardwise.world.comm.runner import runner_of
from shardwise.world.recorder import CollectiveRecorder
from shardwise.world.world import World

NAN = math.nan
KINDS = ("shared_memory", "gloo")


def closed(world: World) -> tuple[str, int]:
    """Rank 0 closes a group with a message in it that nobody takes; the others' next call in it, its own, and descriptors left open."""
    every, group = world.world_group, world.group((1, 0))
    every.barrier()
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a", "b", "c"):
        apart = every.side_group(name)
        apart.barrier()
        apart.close()
    del apart
    gc.collect()
    opened = len(os.listdir("/proc/self/fd")) - before
    group.barrier()
    if world.rank == 0:
        group.isend(torch.ones(5_000_000), 0)  # more than the ring between two ranks holds
        group.close()
        gc.collect()  # its memory is gone, and waiting in another group must not look there
    else:
        time.sleep(0.1)
    every.barrier()
    said = ""
    began = time.monotonic()
    try:
        group.all_reduce(torch.ones(3))
    except RunError as error:
        said = f"{isinstance(error, LostPeer)} {time.monotonic() - began < 5} {error}"
    every.barrier()
    return said, opened


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_group_is_noticed_and_leaves_nothing(ranks: Any, kind: str) -> None:
    (own, mine), (other, others) = ranks(closed, 2, env={"SHARDWISE_TRANSPORT": kind})
    assert own.startswith("False True")
    assert "was closed" in own
    assert other.startswith("True True rank 1 lost another rank in all_reduce")
    if kind != "gloo":  # whose sockets close by and by
        assert "connection closed by rank 0" in other
        assert mine <= 0
        assert others <= 0


def edges(world: World) -> list[list[str]]:
    group, me, n = world.world_group, world.rank, world.num_ranks
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for op in ("max", "min"):
            for size in (3, 70_000):  # the longer in two phases
                x = torch.full((size,), 2.0, dtype=dtype)
                x[0], x[-1] = (NAN if me == 0 else 1.0), (NAN if me == n - 1 else 1.0)
                group.all_reduce(x, op)
                found.append([str(float(x[i])) for i in (0, 1, -1)])
    assert all(len(one) == 3 for one in found)
    scalar = torch.tensor(1.0)
    for call in (group.all_gather, group.reduce_scatter):
        with pytest.raises(UsageError, match="without dimensions"):
            call(scalar)
    group.all_reduce(scalar)
    assert scalar == n
    if n > 1:
        with pytest.raises(UsageError, match="no order"):
            group.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    return found


@pytest.mark.parametrize("kind", KINDS[:1])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_no_number_stays_so_in_a_maximum(ranks: Any, kind: str, num_ranks: int) -> None:
    for found in ranks(edges, num_ranks, env={"SHARDWISE_TRANSPORT": kind}):
        assert all(one == ["nan", "2.0", "nan"] for one in found)


def lazy(world: World) -> None:
    """Conjugates and negatives that torch has not written down yet, and types that gloo does not have, in every collective."""
    group, me, n = world.world_group, world.rank, world.num_ranks

    def given(rank: int) -> list[Tensor]:
        z = torch.tensor([1 + 2j, -3 + 4j, 5j, 7.0]) * (rank + 1)
        return [z.conj(), z[:1].conj().imag, torch._neg_view(z.real.contiguous()), z.to(torch.complex128), z.real.to(torch.int16)]

    for k in range(len(given(0))):
        mine, every = given(me)[k], [given(r)[k].clone().resolve_conj().resolve_neg() for r in range(n)]
        assert torch.equal(group.all_gather(mine), torch.cat(every)), k
        into = every[0].new_zeros(mine.numel() * n)
        if k > 2:
            group.all_gather_into(into, mine)
            assert torch.equal(into, torch.cat(every)), k
        else:
            with pytest.raises(UsageError, match="contiguous"):
                group.all_gather_into(into, mine)
        pieces = group.reduce_scatter(mine)
        assert torch.equal(pieces, sum(every[1:], every[0])[slice(*span(mine.numel(), n, me))]), k
        for got, wanted in zip(group.exchange([mine] * n, [mine.shape] * n), every, strict=True):
            assert torch.equal(got, wanted), k
        at_last = given(me)[k]
        group.broadcast(at_last, n - 1)
        assert torch.equal(at_last, every[-1]), k
        here = given(me)[k]
        if me == 0:
            group.isend(mine, 1).wait()
        elif me == 1:
            group.irecv(here, 0).wait()
            assert torch.equal(here, every[0]), k
        summed = given(me)[k]
        group.all_reduce(summed, wait=False).wait()
        assert torch.equal(summed, sum(every[1:], every[0])), k
        if mine.dtype is torch.float32:
            most = given(me)[k]
            group.all_reduce(most, "max")
            assert torch.equal(most, torch.stack(every).amax(0)), k


def span(length: int, num: int, index: int) -> tuple[int, int]:
    start, size = even_shard_range(length, num, index)
    return start, start + size


@pytest.mark.parametrize("kind", KINDS)
def test_lazy_conjugates_and_negatives_arrive_as_they_read(ranks: Any, kind: str) -> None:
    ranks(lazy, 3, env={"SHARDWISE_TRANSPORT": kind})


def short(world: World) -> None:
    """Sums of int16 wrap as torch's own do, whoever adds them."""
    every = [torch.tensor([30_000, -30_000, 7 * r, -32_768], dtype=torch.int16) for r in range(world.num_ranks)]
    for wait in (True, False):
        for op, wanted in (("sum", sum(every[1:], every[0])), ("max", torch.stack(every).amax(0)), ("min", torch.stack(every).amin(0))):
            x = every[world.rank].clone()
            world.world_group.all_reduce(x, op, wait=wait).wait()  # type: ignore[arg-type]
            assert x.tolist() == wanted.tolist()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_short_whole_numbers_are_added_everywhere(ranks: Any, kind: str, num_ranks: int) -> None:
    ranks(short, num_ranks, env={"SHARDWISE_TRANSPORT": kind})


def test_a_group_and_its_runner_of_collectives_end_together() -> None:
    group = Group((0,), 0, CollectiveRecorder(), torch.device("cpu"), lambda ranks, connection: (None, ""))
    assert runner_of(group) is runner_of(group)
    seen = weakref.ref(group)
    del group
    gc.collect()
    assert seen() is None


def alone(world: World) -> None:
    world.world_group.barrier()
    if world.rank == 0:
        world.world_group.all_reduce(torch.ones(3))


def test_a_call_of_one_rank_alone_is_named_by_the_users_line(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(alone, 2)
    said = str(caught.value)
    assert "every rank must run test_group_edges.py:" in said
    assert "`world.world_group.all_reduce(torch.ones(3))`" in said
    assert "rank 1 had returned" in said
    assert _describe_users_call(None) == ""  # a thread of the library's own has no line of the user's
