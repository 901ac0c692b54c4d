"""Shared memory: what a rank sends in an all-reduce lies there from its start on, also behind others, so that no rank waits for another to
run again. Sums are closed forms."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwise.world.world import World

LIMIT_S = 20.0


def wait_for(path: Path) -> bool:
    """Return whether a file has come, without a call of the transport."""
    began = time.monotonic()
    while not path.exists() and time.monotonic() - began < LIMIT_S:
        time.sleep(0.005)
    return path.exists()


def started_then_away(world: World, folder: str) -> tuple[bool, list[list[float]], list[float]]:
    """Start three all-reduces on rank 0, which then calls nothing until rank 1 has the results of all."""
    group, started, ended = world.world_group, Path(folder, "started"), Path(folder, "ended")
    assert group.shares_memory or group.connect() is None
    values = [torch.full((n,), float(world.rank + 1 + n)) for n in (3, 5000, 8)]
    if world.rank == 1:
        wait_for(started)
    works = [group.all_reduce(x, wait=False) for x in values]
    if world.rank == 0:
        started.touch()
        is_ended = wait_for(ended)
    else:
        for work in works:
            work.wait()
        ended.touch()
        is_ended = True
    for work in works:
        work.wait()
    twice = torch.full((4,), float(world.rank + 1))
    again = [group.all_reduce(twice, wait=False) for _ in range(3)]  # each adds what the one before has added
    for work in again:
        work.wait()
    return is_ended, [x.unique().tolist() for x in values], twice.tolist()


def test_all_reduces_end_while_the_other_rank_is_away(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for is_ended, sums, twice in ranks(started_then_away, 2, str(tmp_path)):
        assert is_ended
        assert sums == [[3.0 + 2 * n] for n in (3, 5000, 8)]
        assert twice == [12.0] * 4  # 1 + 2, twice that, and twice that
