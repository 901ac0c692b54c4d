"""Ranks that are lost in a loop of their own, on every transport: those that are left and the one that is new compute the same numbers."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwise.errors import ConfigError, RankError
from shardwise.run.recovery import snapshots
from shardwise.world.launch.watch import RecoveryPolicy
from shardwise.world.world import World

STEPS = 12


def climb(world: World, how: str, lost: tuple[int, ...], always: bool, interval: int = 0) -> tuple[float, int]:
    """Some steps of a recurrence that depends on all ranks; ranks `lost` come to harm in step 7, once or in every generation.

    `interval`: of snapshots with a pace, as on GPUs.
    """
    snapshots.copy_interval_steps = lambda copy_s, step_s: interval  # type: ignore[assignment]
    while True:
        try:
            return _climb(world, how, lost, always, bool(interval))
        except Exception as error:
            cause = error
        world = world.next_generation(cause)


def _climb(world: World, how: str, lost: tuple[int, ...], always: bool, is_paced: bool) -> tuple[float, int]:
    x = torch.ones((), dtype=torch.float64)
    kept = snapshots.Snapshots(world, snapshots.RankState([x]), is_paced)
    start = snapshots.agree_on_step(world) if world.generation else None
    if start is not None:
        assert kept.restore(start) == {"step": start}
    pair = world.group((world.rank // 2 * 2, world.rank // 2 * 2 + 1))  # a rank whose neighbour lives hears of it through that one
    timed_step = world.pace.time_steps()
    for step in range(start or 0, STEPS):
        with timed_step:
            y = x * (world.rank + 2)
            pair.all_reduce(y)
            if step == 7 and world.rank in lost and (always or world.generation == 0):
                harm(how)
            world.world_group.all_reduce(y)
            x.copy_(y.remainder(97.0))
        kept.take(step + 1, {"step": step + 1})
    world.world_group.barrier()
    return float(x), world.generation


def harm(how: str) -> None:
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(3)
        case "sleep":
            time.sleep(600)
        case "hold":  # the interpreter's lock
            ctypes.PyDLL(None).sleep(600)
        case "error":
            raise ConfigError("no such key")


def climbed(num_ranks: int) -> float:
    x = 1.0
    for _ in range(STEPS):
        x = sum(x * (r // 2 * 2 + 2) + x * (r // 2 * 2 + 3) for r in range(num_ranks)) % 97.0
    return x


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def survive(ranks: Callable[..., list[Any]], said: list[str]) -> Callable[..., list[Any]]:
    def run(num_ranks: int, how: str, lost: tuple[int, ...], always: bool = False, transport: str = "") -> list[Any]:
        env = {"SHARDWISE_TRANSPORT": transport} if transport else {}
        options = {"recovery": RecoveryPolicy(3, said.append), "hang_after_s": 1.0, "env": env}
        return ranks(climb, num_ranks, how, lost, always, **options)

    return run


@pytest.mark.parametrize("how", ["kill", "stop", "segfault", "exit", "sleep", "hold"])
def test_a_lost_rank_is_replaced(survive: Callable[..., list[Any]], said: list[str], how: str) -> None:
    assert survive(2, how, (1,)) == [(climbed(2), 1)] * 2
    assert how not in ("kill", "segfault", "exit") or "its state after step 7 is kept" in said[0]
    named = {"stop": "rank 1: its process is stopped", "sleep": "all_reduce", "hold": "rank 1 gave no sign"}.get(how, "rank 1 ")
    assert said[0].startswith(named)


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "boxes=2"])
def test_on_every_transport(survive: Callable[..., list[Any]], said: list[str], transport: str, how: str) -> None:
    """The others keep their processes, over gloo, too, which does not let them go by itself while a member is stopped."""
    assert survive(4, how, (3,), transport=transport) == [(climbed(4), 1)] * 4
    assert not any("replaced, too" in text for text in said)
    assert sum("takes its place" in text for text in said) == 1


def test_snapshots_with_a_pace_repeat_the_steps_since_the_last(ranks: Callable[..., list[Any]], said: list[str]) -> None:
    """After steps 1, 5 and 9 there is one: a rank that is lost in step 8 goes on after 5, and computes what it would have."""
    found = ranks(climb, 2, "kill", (1,), False, 4, recovery=RecoveryPolicy(3, said.append), hang_after_s=1.0)
    assert found == [(climbed(2), 1)] * 2
    assert "its state after step 5 is kept" in said[0]


def test_several_at_once(survive: Callable[..., list[Any]]) -> None:
    assert [x for x, _ in survive(4, "kill", (0, 3))] == [climbed(4)] * 4


def test_all_of_them(survive: Callable[..., list[Any]]) -> None:
    assert [x for x, _ in survive(2, "kill", (0, 1))] == [climbed(2)] * 2


def test_a_crash_loop_ends_with_its_cause(survive: Callable[..., list[Any]]) -> None:
    cause = r"4 losses of ranks after step 7, and no step further; the last: rank 1 was killed by SIGSEGV"
    with pytest.raises(RankError, match=cause) as caught:
        survive(2, "segfault", (1,), always=True)
    assert caught.value.rank == 1


def test_an_exception_is_an_answer_and_no_loss(survive: Callable[..., list[Any]], said: list[str]) -> None:
    with pytest.raises(ConfigError, match="rank 1 failed: no such key"):
        survive(2, "error", (1,))
    assert not said
