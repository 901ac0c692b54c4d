"""Cores of ranks that wait, lent in a run: which computes get more threads, that each gives them back, and that nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import RankError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.world.launch.launch import launch, num_cores
from shardwise.world.world import World
from tests.support.verified_models import Subject

pytestmark = pytest.mark.skipif(num_cores() < 2, reason="one core has none to lend")


class Deep(nn.Module):
    """Four equal layers; the last raises where it meets a batch of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def _plan(text: str) -> Plan:
    layout = replace(Layout.parse(text), precision="float64")
    each = 4 // layout.num_stages
    return Plan(layout, "deep", "here", 64, tuple(f"layers.{each * s}/linear" for s in range(1, layout.num_stages)))


def _steps(world: World, text: str) -> tuple[list[list[int]], list[float], dict[str, Tensor] | None, int]:
    """Threads that each step asked for, losses, weights, and the threads after it."""
    asked: list[list[int]] = []
    set_threads, own = torch.set_num_threads, torch.get_num_threads()

    def noted(number: int) -> None:
        asked[-1].append(number)
        set_threads(number)

    torch.set_num_threads = noted
    try:
        x = torch.arange(64.0 * 96, dtype=torch.float64).reshape(64, 96).sin()
        engine, losses = Engine(_plan(text), Deep, (x,), None, world, seed=3), []
        for _ in range(2):
            asked.append([])
            losses.append(engine.step((x,)).loss)
        asked.append([])
        losses.append(engine.evaluate((x,)))
    finally:
        torch.set_num_threads = set_threads
    assert torch.get_num_threads() == own
    return asked, losses, engine.full_state_dict(), own


@pytest.mark.parametrize(
    ("schedule", "lent"),
    [("gpipe", (2, 2)), ("sequential", (8, 8)), ("1f1b", (2, 1)), ("zb-v", (1, 0))],
)
def test_who_waits_lends(schedule: str, lent: tuple[int, int]) -> None:
    """So many computes of four microbatches have both cores in a training step, none in evaluation; twice the same to the last bit, and
    beside it without lending the same but for rounding.
    """
    text = f"pipeline=2 microbatches=4 schedule={schedule}"
    runs = [launch(_steps, 2, f"{text} lend={word}", threads=1) for word in ("on", "on", "off")]
    for rank in range(2):
        asked = runs[0][rank][0]
        assert asked[:2] == [[2, 1] * lent[rank]] * 2
        assert asked[2] == []
        assert runs[2][rank][0] == [[], [], []]
    first, again, off = (run[0] for run in runs)
    assert first[1] == again[1]
    assert first[1] == pytest.approx(off[1], rel=1e-12)
    for name, value in first[2].items():
        assert torch.equal(value, again[2][name]), name
        assert torch.allclose(value, off[2][name], rtol=1e-11, atol=1e-13), name


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "pipeline=2 microbatches=4 schedule=gpipe lend=on threads=1"),
        ("resnet-tiny", "pipeline=2 microbatches=4 schedule=gems-master lend=on threads=1"),
        ("unet-tiny", "pipeline=2 chunks=2 microbatches=4 schedule=interleaved recompute=full lend=on threads=1"),
        ("t5-tiny", "pipeline=2 microbatches=3 schedule=zb-h1 lend=on threads=1"),
    ],
)
def test_lending_equals_serial(subject: Callable[[str], Subject], name: str, layout: str) -> None:
    """Loss, gradients and weights, with unequal microbatches among them."""
    found = subject(name).check(replace(Layout.parse(layout), precision="float64"))
    assert found.ok, found.first_difference
    assert found.tolerance <= 1e-9


def _failing(world: World) -> None:
    x = torch.zeros(64, 96, dtype=torch.float64)
    engine = Engine(_plan("pipeline=2 microbatches=4 schedule=sequential lend=on"), Deep, (x,), None, world, seed=3)
    own = torch.get_num_threads()
    engine.executor.runners[world.rank].backward = None  # type: ignore[method-assign]
    try:
        engine.step((x,))
    finally:
        assert torch.get_num_threads() == own, "threads were not given back"


def test_threads_come_back_from_a_step_that_fails() -> None:
    with pytest.raises(RankError, match="NoneType"):
        launch(_failing, 2, threads=1, show=False)


def _environment(world: World) -> str | None:
    return os.environ.get("OMP_WAIT_POLICY")


@pytest.mark.parametrize(("ranks", "threads", "policy"), [(2, 1, "PASSIVE"), (1, 1, None)])
def test_threads_of_ranks_that_may_lend_sleep(ranks: int, threads: int, policy: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user has not said otherwise."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert launch(_environment, ranks, threads=threads) == [policy] * ranks
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert launch(_environment, ranks, threads=threads) == ["ACTIVE"] * ranks


def test_ranks_of_a_process_that_has_computed_with_threads_may_have_more() -> None:
    """In a process of its own, since the pool of threads would be this one's. A rank that has none of its pool waits for ever."""
    code = """
import torch
from shardwise.world.launch.launch import launch

def main():
    def rank(world):
        torch.set_num_threads(2)
        return world.may_add_threads, float(torch.ones(2_000_000).exp().sum())

    torch.set_num_threads(2)
    want = float(torch.ones(2_000_000).exp().sum())
    assert launch(rank, 2, timeout_s=60) == [(True, want)] * 2
    assert float(torch.ones(2_000_000).exp().sum()) == want

main()
"""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
