"""What a device holds is counted, limited and told: against known sizes, the process's own growth, and twins that count otherwise."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import OutOfMemory, UsageError
from shardwise.run.state.parameters import Bucket
from shardwise.units import format_bytes, parse_bytes
from shardwise.world.launch.launch import launch
from shardwise.world.memory import Accounts, accounts_of
from shardwise.world.memory.accounts import HostAccounts, load_memory_library
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

pytestmark = pytest.mark.usefixtures("few_objects")
MIB = 1 << 20
CPU = torch.device("cpu")


@pytest.fixture
def accounts(counting: Accounts) -> Iterator[Accounts]:
    yield counting
    accounts_of(CPU)  # without a limit


def test_every_part_has_what_was_allocated_for_it(accounts: Accounts) -> None:
    before, host = accounts.current(), accounts.host_bytes()
    with accounts.counting("activations"):
        kept = [torch.ones(MIB // 4) for _ in range(8)]
        with accounts.counting("host"):
            beside = torch.ones(MIB)
    views = [x[10:20] for x in kept]  # no memory of their own
    held = accounts.current()
    assert held.activations - before.activations == 8 * MIB
    assert accounts.host_bytes() - host == 4 * MIB == beside.nbytes
    accounts.assign("parameters", [*views[:2], kept[0]])
    assert accounts.current().parameters - before.parameters == 2 * MIB
    assert accounts.current().activations - before.activations == 6 * MIB
    del kept, views
    assert accounts.current() == before


def test_the_peak_is_of_one_moment(accounts: Accounts) -> None:
    accounts.reset_peak()
    before = accounts.current()
    with accounts.counting("activations"):
        first = torch.ones(3 * MIB // 4)
    with accounts.counting("buffers"):
        torch.ones(2 * MIB // 4)
    del first
    with accounts.counting("gradients"):
        torch.ones(4 * MIB // 4)
    peak = accounts.peak()
    assert peak.total - before.total == 5 * MIB
    assert (peak.activations - before.activations, peak.buffers - before.buffers) == (3 * MIB, 2 * MIB)
    assert peak.gradients == before.gradients


def test_a_forked_rank_counts_nothing_of_what_its_parent_holds(accounts: Accounts) -> None:
    """A rank that is forked beside a model of the process before it told of both."""
    with accounts.counting("activations"):
        inherited, given_back = torch.ones(MIB), torch.ones(MIB)
    parent = accounts.current()

    def on_rank(world: World) -> list[float]:
        nonlocal given_back
        mine = accounts_of(world.device)
        seen = [mine.current().total, mine.host_bytes() < MIB]
        mine.assign("parameters", [inherited])
        with mine.counting("gradients"):
            own = torch.ones(MIB)
        del given_back
        return [*seen, mine.current().total, mine.peak().total, float(own[0])]

    assert launch(on_rank, 1, show=False) == [[0.0, True, 8 * MIB, 8 * MIB, 1.0]]
    assert accounts.current() == parent
    assert inherited.nbytes == 4 * MIB


GROWTH = """
import ctypes
import torch
from shardwise.world.memory import accounts_of

def anonymous():  # pages of files come and go with the system's own needs: what the program asked for does not
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Anonymous:"))

accounts = accounts_of(torch.device("cpu"))
torch.full((1 << 20,), 1.0)  # what comes with the first is not its own
ctypes.CDLL(None).malloc_trim(0)  # nor are pages that earlier work touched and gave back to the allocator, which would be used again
before, at = anonymous(), accounts.current().total
with accounts.counting("activations"):
    kept = [torch.full((1 << 20,), 1.0) for _ in range(24)]
print(int(accounts.current().total - at), anonymous() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="anonymous memory is read from /proc")
def test_what_is_counted_is_what_the_process_grows_by(accounts: Accounts) -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    counted, grown = map(int, done.stdout.split())
    assert counted == 24 * 4 * MIB
    assert counted <= grown < counted * 1.1


def test_a_limit_is_enforced_with_the_numbers(accounts: Accounts) -> None:
    held = format_bytes(6 * MIB + accounts.current().activations)  # with what the process has kept since earlier tests
    limited = accounts_of(CPU, accounts.current().total + 8 * MIB)
    with limited.with_out_of_memory_error(0, "activations"):
        kept = torch.ones(6 * MIB // 4)
    with (
        pytest.raises(OutOfMemory, match=rf"rank 3 holds .* of .*activations {held}.*needs 4\.00 MiB more; use recompute=full"),
        limited.with_out_of_memory_error(3),
    ):
        torch.ones(4 * MIB // 4)
    with limited.counting("host"):  # beside the device there is no limit
        assert torch.ones(40 * MIB // 4).nbytes == 40 * MIB
    del kept
    with limited.with_out_of_memory_error(0):
        torch.ones(7 * MIB // 4)


def test_without_a_compiler_a_limit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no C compiler" in str(load_memory_library(tmp_path, compiler="no-such-compiler"))
    monkeypatch.setattr("shardwise.world.memory.accounts.load_memory_library", lambda: "no C compiler 'c++' in PATH")
    assert not accounts_of(CPU).is_counting
    with pytest.raises(UsageError, match="needs a C\\+\\+ compiler"):
        accounts_of(CPU, 1e9)


WIDTH, DEPTH, ROWS = 64, 6, 512


class Deep(torch.nn.Module):
    """Wide batches through few weights: activations are most of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


STATE = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)
VALUE = 4 * ROWS * WIDTH


def _trained(limit: float, layout: str) -> Any:
    gc.collect()  # engines hold themselves in a circle
    batch = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)),)
    engine = shardwise.parallelize(Deep, batch, loss=lambda out, _: out, plan=layout, seed=0, device_memory=limit)
    for _ in range(2):
        engine.step(batch)
    return engine.full_state_dict(), engine.peak_memory()


def test_a_run_counts_its_state_and_what_backward_keeps(accounts: Accounts) -> None:
    gc.collect()
    before = accounts.current()
    _, peak = _trained(0, "data=1")
    assert peak.parameters - before.parameters == STATE
    assert peak.gradients == before.gradients  # when backward begins there are none
    assert STATE * 2 <= peak.optimizer - before.optimizer <= STATE * 2 + 64
    # The input of every product but the first (the batch is the user's), the input of every GELU, and what is there at the moment.
    kept = peak.activations - before.activations
    assert (2 * DEPTH - 1) * VALUE <= kept <= (2 * DEPTH + 2) * VALUE


def test_what_does_not_fit_runs_with_recomputation_to_the_same_weights(accounts: Accounts) -> None:
    state, peak = _trained(0, "data=1")
    recomputed, less = _trained(0, "data=1 recompute=full")
    assert all(torch.equal(state[name], recomputed[name]) for name in state)
    limit = (peak.total + less.total) / 2
    with pytest.raises(OutOfMemory, match="activations"):
        _trained(limit, "data=1")
    recomputed, less = _trained(limit, "data=1 recompute=full")
    assert less.total < limit < peak.total
    assert all(torch.equal(state[name], recomputed[name]) for name in state)
    gc.collect()
    with pytest.raises(OutOfMemory, match="optimizer"):
        _trained(accounts.current().total + 3 * STATE, "data=1 recompute=full")


def test_a_twin_that_counts_nothing_as_the_device_is_found(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were activations counted as host memory, the limit would never bind."""
    gc.collect()
    before = accounts.current().activations
    _, peak = _trained(0, "data=1")
    monkeypatch.setattr(HostAccounts, "set_part", lambda self, part: self._library.shardwise_memory_part(5))
    _, spoiled = _trained(0, "data=1")
    assert spoiled.activations - before < (peak.activations - before) / 4


def test_an_engine_that_is_dropped_leaves_nothing(accounts: Accounts) -> None:
    gc.collect()
    before = accounts.current()
    _trained(0, "data=1")
    gc.collect()
    assert accounts.current().total == before.total


@pytest.mark.parametrize("limit", ["24MiB", "9MiB"])
def test_what_is_planned_under_a_limit_runs_under_it(accounts: Accounts, limit: str) -> None:
    """In one process and without a limit it holds 39 MiB."""
    model, words = "gpt-tiny:sequence=128", "ranks=1 precision=float32"
    gc.collect()
    plan = shardwise.plan(model, 16, cluster="1xcpu-2", constraints=words, device_memory=limit)
    engine = shardwise.parallelize(model, 16, plan=plan, seed=0, device_memory=limit)
    engine.step(resolve(model).batch(16))
    peak = engine.peak_memory()
    assert peak is not None
    assert plan.prediction is not None
    memory = plan.prediction.memory
    assert peak.total <= parse_bytes(limit)
    assert peak.total == pytest.approx(memory.total - memory.margin, rel=0.1)


def test_a_step_on_one_rank_holds_no_more_than_plain_pytorch(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both counted by one library. The twin, whose gradients stay from step to step, holds them in forward too."""
    batch = (torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)),)

    def peak_of(make: Callable[[], Callable[[], object]]) -> float:
        gc.collect()
        before = accounts.current().total
        with accounts.counting("buffers"):
            step = make()
            for _ in range(2):
                step()
            accounts.reset_peak()
            step()
        return accounts.peak().total - before

    def plain() -> Callable[[], object]:
        module = Deep()
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        return lambda: (module(*batch).backward(), optimizer.step(), optimizer.zero_grad())

    def ours() -> Callable[[], object]:
        engine = shardwise.parallelize(Deep, batch, loss=lambda out, _: out, plan="data=1", seed=0)
        return lambda: engine.step(batch)

    few = 2 * DEPTH * torch.get_rng_state().nbytes + 12000  # a state of the generator for every tensor that is drawn, and counters
    plains = peak_of(plain)
    assert peak_of(ours) <= plains + few < plains + STATE
    monkeypatch.setattr(Bucket, "free", lambda bucket: None)
    assert peak_of(ours) >= plains + STATE
