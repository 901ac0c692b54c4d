"""What does not fit is trained where it is: activations on the host, or made again, by layer and by the program's actions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import OutOfMemory, ProgramError
from shardwise.plan.ir.program import Program
from shardwise.run.engine import DeviceOptions, Engine
from shardwise.run.residency.host_store import HostStore
from shardwise.schedules.lower import gather_weights, offload, recompute
from shardwise.world.launch.current import current_world
from shardwise.world.memory import Accounts, accounts_of

pytestmark = pytest.mark.usefixtures("few_objects")


class Residual(nn.Module):
    """A small ResNet's layers on wide images: one storage is kept by several operators, and read after the layer that keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
            for _ in range(4)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.relu(x + layer(x))
        return self.head(x.mean((2, 3))).square().mean()


BATCH = (torch.randn(4, 3, 48, 48, generator=torch.Generator().manual_seed(0)),)


def _loss(output: Tensor, batch: Any) -> Tensor:
    return output


@pytest.fixture
def accounts(counting: Accounts) -> Iterator[Accounts]:
    gc.collect()
    yield accounts_of(torch.device("cpu"))  # whose peak is of what comes from now on
    gc.collect()
    accounts_of(torch.device("cpu"))


def _engine(layout: str, change: Callable[[Program], Program] | None = None, limit: float = 0.0) -> Engine:
    gc.collect()
    plan = shardwise.plan(Residual, BATCH, loss=_loss, cluster="1xcpu-2", layout=layout)
    if change is not None:
        bare = Engine(plan, Residual, BATCH, _loss, current_world(), seed=0)
        plan = replace(plan, layout=plan.layout.with_schedule("own.txt", str(change(bare.rank_model.program))))
        del bare
        gc.collect()
    return Engine(plan, Residual, BATCH, _loss, current_world(), seed=0, device=DeviceOptions(memory_limit_bytes=limit))


@cache
def _trained(*args: Any) -> tuple[dict[str, Tensor], float]:
    """Weights after two steps and the peak in bytes: of the same arguments the same, so several tests compare with one run."""
    engine = _engine(*args)
    for _ in range(2):
        engine.step(BATCH)
    peak = engine.peak_memory()
    state = engine.full_state_dict()
    assert peak is not None
    assert state is not None
    return state, peak.total


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


CHUNKS = "data=1 chunks=3 schedule=interleaved microbatches=2"


@cache
def _everywhere(lower: Callable[..., Program], stages: int = 3, microbatches: int = 2) -> Callable[[Program], Program]:
    return lambda program: lower(program, {(s, m) for s in range(stages) for m in range(microbatches)})


@pytest.mark.parametrize("layout", ["data=1 offload=activations", "data=1 offload=all", "data=1 offload=optimizer microbatches=2"])
def test_offload_changes_no_bit(accounts: Accounts, layout: str) -> None:
    plain, peak = _trained((layout.split("offload")[0] + layout.partition("offload")[2].partition(" ")[2]).strip())
    moved, less = _trained(layout)
    assert _same(plain, moved)
    assert less < peak


@pytest.mark.parametrize("lower", [offload, recompute, gather_weights], ids=["offload", "recompute", "gather"])
def test_actions_of_a_program_change_no_bit(accounts: Accounts, lower: Any) -> None:
    """The stages of one rank alone: what is kept between a stage's forward and its backward is moved, or made again."""
    plain, peak = _trained(CHUNKS)
    changed, less = _trained(CHUNKS, gather_weights if lower is gather_weights else _everywhere(lower))
    assert _same(plain, changed)
    assert less < peak or lower is gather_weights


def test_a_limit_that_a_serial_run_exceeds(accounts: Accounts) -> None:
    plain, peak = _trained("data=1")
    for layout, change in (
        ("data=1 offload=activations", None),
        ("data=1 recompute=full", None),
        (CHUNKS, _everywhere(offload)),
        (CHUNKS, _everywhere(recompute)),
    ):
        _, less = _trained(layout, change)
        limit = 1.02 * less
        assert limit < peak
        with pytest.raises(OutOfMemory, match="activations"):
            _trained("data=1", None, limit)
        within, most = _trained(layout, change, limit)
        assert most < limit
        serial = plain if "microbatches" not in layout else _trained(CHUNKS)[0]
        assert _same(serial, within)


def test_what_is_moved_is_counted_once_a_storage(accounts: Accounts) -> None:
    engine = _engine(CHUNKS, _everywhere(offload))
    engine.step(BATCH)
    first = engine._host_store.copied_bytes
    engine.step(BATCH)
    assert engine._host_store.copied_bytes == 2 * first > 0


def test_a_program_that_moves_and_one_that_drops_are_proven_and_mixed(accounts: Accounts) -> None:
    plain, _ = _trained(CHUNKS)

    def mixed(program: Program) -> Program:
        return recompute(offload(program, {(0, 0), (0, 1)}), {(1, 0), (1, 1)})

    assert _same(plain, _trained(CHUNKS, mixed)[0])


class Counts(Residual):
    """Its first stage writes a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x * self.seen)


def test_a_stage_that_reads_what_the_model_writes_is_not_dropped() -> None:
    plan = shardwise.plan(Counts, BATCH, loss=_loss, cluster="1xcpu-2", layout="data=1 chunks=2 schedule=interleaved microbatches=2")
    bare = Engine(plan, Counts, BATCH, _loss, current_world(), seed=0)
    program = recompute(bare.rank_model.program, {(s, m) for s in (0, 1) for m in (0, 1)})
    own = replace(plan, layout=plan.layout.with_schedule("own.txt", str(program)))
    with pytest.raises(ProgramError, match="reads a buffer that the model writes"):
        Engine(own, Counts, BATCH, _loss, current_world(), seed=0)


def test_a_copy_that_is_not_what_was_kept_is_found(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = _trained("data=1")
    copy_out = HostStore._copy_to_host

    def spoiled(self: HostStore, block: Any) -> None:
        copy_out(self, block)
        block.host_copy[:4] = 0

    monkeypatch.setattr(HostStore, "_copy_to_host", spoiled)
    assert not _same(plain, _trained.__wrapped__("data=1 offload=activations")[0])


MIXED = [
    "data=1 offload=activations:2",
    "data=1 offload=activations:1 recompute=full:2",
    "data=1 offload=activations:2 recompute=full",
    "data=1 offload=all:layers.1+layers.3 recompute=full:layers.0",
    "data=1 microbatches=2 offload=activations:layers.0+layers.2 recompute=full:1",
]


@pytest.mark.parametrize("layout", MIXED)
def test_layers_that_move_and_layers_that_are_repeated_change_no_bit(accounts: Accounts, layout: str) -> None:
    plain, peak = _trained("data=1 microbatches=2" if "microbatches" in layout else "data=1")
    mixed, less = _trained(layout)
    assert _same(plain, mixed)
    assert less < peak


def test_each_layer_does_what_was_asked_of_it(accounts: Accounts) -> None:
    """By layer: two move, one is repeated, one stays; and only what those two keep is copied, there and back."""
    every, two, mixed = (
        _engine(f"data=1 {words}") for words in ("offload=activations:4", "offload=activations:2", "offload=activations:2 recompute=full:1")
    )
    for engine in (every, two, mixed):
        engine.step(BATCH)
    modules = [type(m).__name__ for runner in mixed.executor.runners.values() for m in runner.local.module.children()]
    assert [name for name in modules if name in ("OffloadedLayer", "RecomputedModule")] == [
        "OffloadedLayer",
        "OffloadedLayer",
        "RecomputedModule",
    ]
    assert two._host_store.copied_bytes == mixed._host_store.copied_bytes == every._host_store.copied_bytes / 2 > 0


@pytest.mark.parametrize(("moves", "order"), [(2, "c1 c0 r1 r0"), (3, "c2 r2 c1 r1 c0 r0"), (4, "r3 c3 c2 r2 c1 r1 c0 r0")])
def test_where_copies_overlap_layers_are_called_as_soon_as_there_is_room(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch, moves: int, order: str
) -> None:
    """Of four layers: one that is away is called (c) for each that stays and is over, then one each time one is read (r)."""
    plain, _ = _trained("data=1")
    monkeypatch.setattr(HostStore, "overlaps", property(lambda self: True))
    events: list[str] = []
    back, unpack = HostStore.load, HostStore._unpack

    def depth(moved: Any) -> int:
        return 0 if moved.previous is None else 1 + depth(moved.previous)

    def backed(self: HostStore, moved: Any) -> None:
        if moved.is_offloaded:
            events.append(f"c{depth(moved)}")
        back(self, moved)

    def unpacked(self: HostStore, kept: Any) -> Tensor:
        if not isinstance(kept, Tensor) and not kept.activations.is_in_backward:
            events.append(f"r{depth(kept.activations)}")
        return unpack(self, kept)

    monkeypatch.setattr(HostStore, "load", backed)
    monkeypatch.setattr(HostStore, "_unpack", unpacked)
    engine = _engine(f"data=1 offload=activations:{moves}")
    engine.step(BATCH)
    assert " ".join(events) == order
    engine.step(BATCH)
    state = engine.full_state_dict()
    assert state is not None
    assert _same(plain, state)
