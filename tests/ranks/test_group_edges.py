"""Groups at their edges: closed ones, numbers that are none, tensors without dimensions. Over every transport."""

from __future__ import annotations

import gc
import math
import os
import time
from typing import Any

import pytest
import torch

from weft.errors import RunError, UsageError
from weft.world.group import LostPeer
from weft.world.world import World

NAN = math.nan
KINDS = ("shared_memory", "portable", "gloo")


def closed(world: World) -> tuple[str, int]:
    """Rank 0 closes a group with a message in it that nobody takes; the others' next call in it, its own, and descriptors left open."""
    every, group = world.everyone, world.group((1, 0))
    every.barrier()
    before = len(os.listdir("/proc/self/fd"))
    for name in ("a", "b", "c"):
        apart = every.apart(name)
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
    (own, mine), (other, others) = ranks(closed, 2, env={"WEFT_TRANSPORT": kind})
    assert own.startswith("False True")
    assert "was closed" in own
    assert other.startswith("True True rank 1 lost another rank in all_reduce")
    if kind != "gloo":  # whose sockets close by and by
        assert "connection closed by rank 0" in other
        assert mine <= 0
        assert others <= 0


def edges(world: World) -> list[list[str]]:
    group, me, n = world.everyone, world.rank, world.num_ranks
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


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_is_no_number_stays_so_in_a_maximum(ranks: Any, kind: str, num_ranks: int) -> None:
    for found in ranks(edges, num_ranks, env={"WEFT_TRANSPORT": kind}):
        assert all(one == ["nan", "2.0", "nan"] for one in found)
