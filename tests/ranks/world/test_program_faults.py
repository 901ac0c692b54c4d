"""A rank that dies, stops or is late inside a collective of several steps: every other is told which rank, collective and step, in time.

The collective runs in a second world, in a process that the launcher does not know, so that the others can go on to say what they heard.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_shared_memory import mapped_by_anyone

from shardwise.collectives import build
from shardwise.errors import RankError, RunError
from shardwise.plan.ir.choice import AllReduceChoices
from shardwise.world import private
from shardwise.world.comm.all_reduce import CollectiveDispatcher
from shardwise.world.comm.pending import LostPeer
from shardwise.world.comm.runner import runner_of
from shardwise.world.comm.running import ProgramRunner
from shardwise.world.recorder import CollectiveRecorder
from shardwise.world.world import World

TIMEOUT_S = 2.0
CULPRIT, NUM_RANKS = 1, 4
KINDS = ("gloo", "shared_memory")


def at_step(step: int, what: str) -> None:
    """From now on this process does `what` when it comes to a step of a program."""
    real = CollectiveRecorder.set_step

    def then(self: CollectiveRecorder, at: int, peer: int, now: int) -> None:
        real(self, at, peer, now)
        if now >= step:
            if what == "late":
                time.sleep(2.5 * TIMEOUT_S)
            else:
                os.kill(os.getpid(), signal.SIGKILL if what == "dies" else signal.SIGSTOP)

    CollectiveRecorder.set_step = then  # type: ignore[method-assign]


def fault(world: World, kind: str, what: str, step: int, name: str, folder: str) -> str:
    """What this rank was told, after "in time" where it was."""
    others = [Path(folder, f"told-{rank}") for rank in range(world.num_ranks) if rank != CULPRIT]
    child = os.fork() if world.rank == CULPRIT else 0
    if child:
        until = time.monotonic() + 10 * TIMEOUT_S
        while not all(path.exists() for path in others) and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(child, signal.SIGKILL)
        return signal.Signals(os.WTERMSIG(os.waitpid(child, 0)[1])).name
    said, began = "no error", time.monotonic()
    try:
        again = World(world.rank, world.num_ranks, private.file_store(f"{folder}/fault", NUM_RANKS), timeout_s=TIMEOUT_S, transport=kind)
        group = again.world_group
        x = torch.ones(50_000)
        if name == "levels":
            sums = CollectiveDispatcher(group, AllReduceChoices(default="hierarchical"), build)
            assert sums.levels is not None
            start = sums.levels.all_reduce
        else:
            running, program = ProgramRunner(runner_of(group)), build("all_reduce", name, again.num_ranks)

            def start(x: torch.Tensor) -> Any:
                return running.all_reduce(program, x)

        start(x)
        assert x.eq(again.num_ranks).all()
        if world.rank == CULPRIT:
            at_step(step, what)
        for _ in range(2):  # who needs nothing more of the culprit has its sum, and is told in the next one
            began = time.monotonic()
            x.fill_(1.0)
            start(x)
            assert x.eq(again.num_ranks).all()
    except LostPeer as error:
        said = f"{'in time' if time.monotonic() - began < 2 * TIMEOUT_S + 1 else 'late'}: {error}"
        with pytest.raises(RunError, match="this group runs nothing after it"):
            start(x)
    finally:
        if world.rank == CULPRIT:
            time.sleep(10 * TIMEOUT_S)
            os._exit(1)
    Path(folder, f"told-{world.rank}").touch()
    # Nobody leaves before all were told, or the others could be told of this one.
    while not all(path.exists() for path in others):
        time.sleep(0.01)
    return said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "step", "name"), [("dies", 1, "ring"), ("dies", 3, "halving_doubling"), ("stops", 2, "tree"), ("late", 2, "ring")]
)
def test_every_other_rank_is_told(ranks: Any, kind: str, what: str, step: int, name: str, tmp_path: Path) -> None:
    told = ranks(fault, NUM_RANKS, kind, what, step, name, str(tmp_path))
    assert told.pop(CULPRIT) == "SIGKILL"
    for said in told:
        assert re.match(rf"in time: rank \d lost rank \d in all_reduce of float32 \[50000\] by {name} \(ranks 0-3\), in step \d", said), (
            said
        )
    assert any(f"lost rank {CULPRIT} in" in said for said in told)
    if what != "dies":
        assert any("late, stopped, or in another collective" in said for said in told)
    assert not mapped_by_anyone()


@pytest.mark.parametrize("what", ["dies", "stops"])
def test_every_other_rank_is_told_in_levels(ranks: Any, what: str, tmp_path: Path) -> None:
    told = ranks(fault, NUM_RANKS, "boxes=2", what, 2, "levels", str(tmp_path))
    assert told.pop(CULPRIT) == "SIGKILL"
    for said in told:
        assert re.match(
            r"in time: rank \d lost .*rank.* in all_reduce of float32 \[50000\] by hierarchical \(ranks 0-3\), in step \d", said
        )


def unlike(world: World, kind: str, what: str) -> str:
    """Rank 2 calls something else, after a sum that went well."""
    again, me = world.world_group, world.rank
    running = ProgramRunner(runner_of(again))
    ring, other = build("all_reduce", "ring", world.num_ranks), build("all_reduce", "tree", world.num_ranks)
    x = torch.ones(40)
    running.all_reduce(ring, x)
    odd = me == 2
    try:
        if what == "size":
            running.all_reduce(ring, torch.ones(41 if odd else 42))
        elif what == "type":
            running.all_reduce(ring, torch.ones(44, dtype=torch.float64 if odd else torch.float32))
        elif what == "algorithm":
            running.all_reduce(other if odd else ring, torch.ones(45))
        else:
            out = torch.empty(46 // world.num_ranks + (me < 46 % world.num_ranks))
            if odd:
                running.reduce_scatter(build("reduce_scatter", "ring", world.num_ranks), out, torch.ones(46))
            else:
                running.all_reduce(ring, torch.ones(46))
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["size", "type", "algorithm", "collective"])
def test_calls_that_differ_are_an_error_on_every_rank(ranks: Any, kind: str, what: str) -> None:
    for rank, said in enumerate(ranks(unlike, 3, kind, what, env={"SHARDWISE_TRANSPORT": kind})):
        others = "0, 1" if rank == 2 else "2"
        assert re.match(rf"rank {rank} is in \w+ of float\d\d \[\d+\] by \w+, and rank {others} in another collective, size", said), said


def swapped(world: World, folder: str, kind: str) -> str:
    """Sizes that were both agreed on before, in another order on rank 1."""
    again = World(world.rank, 2, private.file_store(f"{folder}/swapped", 2), timeout_s=1.0, transport=kind)
    running, ring = ProgramRunner(runner_of(again.world_group)), build("all_reduce", "ring", 2)
    for size in (10, 12):
        running.all_reduce(ring, torch.ones(size))
    x = torch.full((12 if world.rank else 10,), 1.0)
    try:
        running.all_reduce(ring, x)
    except LostPeer as error:
        return str(error)
    return f"no error, {x.tolist()}"


@pytest.mark.parametrize("kind", KINDS)
def test_known_calls_in_another_order_never_meet(ranks: Any, kind: str, tmp_path: Path) -> None:
    for rank, said in enumerate(ranks(swapped, 2, str(tmp_path), kind)):
        assert f"lost rank {1 - rank} in all_reduce of float32" in said
        assert "by ring (ranks 0,1), in step 1" in said or "in step 2" in said


def dies(world: World) -> None:
    running, ring = ProgramRunner(runner_of(world.world_group)), build("all_reduce", "ring", world.num_ranks)
    x = torch.ones(1000)
    running.all_reduce(ring, x)
    if world.rank == CULPRIT:
        at_step(1, "dies")
    running.all_reduce(ring, x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_launcher_tells_the_first_cause_and_where_the_others_are(ranks: Any, kind: str) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 was killed by SIGKILL.*rank 0.*all_reduce #\d+ float32 \[1000\] by ring, step \d"):
        ranks(dies, 3, env={"SHARDWISE_TRANSPORT": kind})
