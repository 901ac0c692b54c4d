"""Sums in two levels, between boxes of ranks of one host that are told apart as if each were a host, against sums worked out alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.collectives import build
from shardwise.errors import UsageError
from shardwise.plan.ir.choice import AllReduceChoices
from shardwise.world import private
from shardwise.world.comm.all_reduce import CollectiveDispatcher
from shardwise.world.comm.group import SHARED
from shardwise.world.comm.levels import PART_BYTES
from shardwise.world.world import World

DTYPES = ("float32", "float64", "bfloat16", "int64")
SIZES = (0, 1, 5, 4099, PART_BYTES // 2 + 7)  # the last goes in several parts, in every type but bfloat16


def given(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers that every type holds exactly, sums of six of them too."""
    return torch.randint(0, 20, (numel,), generator=torch.Generator().manual_seed(seed * 77 + rank)).to(dtype)


def sums(world: World, ranks: tuple[int, ...]) -> list[tuple[str, str]]:
    """How the parts were connected, after sums of every kind."""
    if world.rank not in ranks:
        return []
    group, n, me = world.group(ranks), len(ranks), ranks.index(world.rank)
    chosen = CollectiveDispatcher(
        group, AllReduceChoices(default="hierarchical"), lambda collective, name, size: build(collective, name, size)
    )
    group.use_dispatcher(chosen)
    assert chosen.levels is not None
    for name in DTYPES:
        dtype = getattr(torch, name)
        for seed, numel in enumerate(SIZES):
            parts = [given(seed, r, numel, dtype) for r in range(n)]
            total = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
            x, buffer = parts[me].clone(), group.shared_buffer(numel + 3, dtype)
            gapped = parts[me].repeat_interleave(2)[::2]
            buffer[1 : 1 + numel].copy_(parts[me])
            works = [group.all_reduce(x, wait=False), group.all_reduce(buffer[1 : 1 + numel], wait=False)]
            works.append(group.all_reduce(gapped, wait=False))
            own = numel // n
            out, gathered = torch.empty(own, dtype=dtype), torch.empty(own * n, dtype=dtype)
            works.append(group.reduce_scatter_into(out, parts[me][: own * n], wait=False))
            works.append(group.all_gather_into(gathered, parts[me][:own].clone(), wait=False))
            for work in works:
                work.wait()
            assert torch.equal(x, total), (name, numel)
            assert torch.equal(gapped, total), (name, numel)
            assert torch.equal(buffer[1 : 1 + numel], total), (name, numel)
            assert not buffer[:1].any()
            assert not buffer[1 + numel :].any()
            assert torch.equal(out, total[own * me : own * me + own])
            assert torch.equal(gathered, torch.cat([part[:own] for part in parts]))
    parts_of = (chosen.levels.host_group, chosen.levels.rail)
    return [(str(part.ranks), SHARED if part.shares_memory else "gloo") for part in parts_of if part is not None and part.size > 1]


def test_boxes_of_one_size_use_every_rail(ranks: Any) -> None:
    told = ranks(sums, 4, (0, 1, 2, 3), env={"SHARDWISE_TRANSPORT": "boxes=2"})
    assert told[0] == [("(0, 1)", SHARED), ("(0, 2)", "gloo")]
    assert told[3] == [("(2, 3)", SHARED), ("(1, 3)", "gloo")]


def test_members_in_any_order(ranks: Any) -> None:
    assert ranks(sums, 6, (5, 0, 1, 4, 2, 3), env={"SHARDWISE_TRANSPORT": "boxes=3"})[5] == [("(5, 4, 3)", SHARED), ("(5, 0)", "gloo")]


@pytest.mark.parametrize(("boxes", "num_ranks"), [("boxes=2,1", 3), ("boxes=1,3,2", 6)])
def test_boxes_that_differ_have_leaders(ranks: Any, boxes: str, num_ranks: int) -> None:
    told = ranks(sums, num_ranks, tuple(range(num_ranks)), env={"SHARDWISE_TRANSPORT": boxes})
    assert sum(kind == "gloo" for one in told for _, kind in one) == boxes.count(",") + 1


def test_a_group_inside_a_world_of_boxes(ranks: Any) -> None:
    ranks(sums, 6, (1, 2, 4, 5), env={"SHARDWISE_TRANSPORT": "boxes=3"})


def test_a_group_of_one_box_in_a_world_of_several(ranks: Any) -> None:
    assert ranks(sums, 4, (2, 3), env={"SHARDWISE_TRANSPORT": "boxes=2"})[2] == [("(2, 3)", SHARED)]


def bytes_between(world: World) -> int:
    """Bytes that this rank's rail summed, of a sum of 4 MB."""
    group = world.world_group
    chosen = CollectiveDispatcher(group, AllReduceChoices(default="hierarchical"), build)
    group.use_dispatcher(chosen)
    seen: list[int] = []
    assert chosen.levels is not None
    rail = chosen.levels.rail
    assert rail is not None
    inner = rail.all_reduce
    rail.all_reduce = lambda x, **given: (seen.append(x.nbytes), inner(x, **given))[1]  # type: ignore[method-assign]
    group.all_reduce(torch.ones(1_000_000), wait=False).wait()
    return sum(seen)


def test_only_a_share_goes_between_boxes(ranks: Any) -> None:
    assert ranks(bytes_between, 4, env={"SHARDWISE_TRANSPORT": "boxes=2"}) == [2_000_000] * 4


def test_one_box_is_the_transports_own(ranks: Any) -> None:
    assert all(ranks(no_levels, 2, env={"SHARDWISE_TRANSPORT": "shared_memory"}))


def no_levels(world: World) -> bool:
    chosen = CollectiveDispatcher(world.world_group, AllReduceChoices(default="hierarchical"), build)
    world.world_group.use_dispatcher(chosen)
    x = torch.full((7,), float(world.rank))
    world.world_group.all_reduce(x, wait=False).wait()
    return chosen.levels is None and bool(x.eq(1).all())


def test_boxes_that_do_not_divide_the_ranks_are_refused(tmp_path: Path) -> None:
    for text in ("boxes=3", "boxes=2,1", "boxes=", "boxes=0", "boxes=a,4", "boxes=2,,2"):
        with pytest.raises(UsageError, match=r"does not divide 4 ranks|is not one of"):
            World(0, 4, private.file_store(f"{tmp_path}/store", 4), transport=text)
