"""Stages that arrange their ranks differently: equal to the serial model, each element between meshes once, and broken twins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.rank_model import build
from shardwise.run.step.stage_resharding import StageResharding
from shardwise.world.launch.launch import launch
from shardwise.world.world import CollectiveWork, World
from tests.support.traced import of

ODD = "tests/support/odd_models.py"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "pipeline=2 inner=4x1/2x2 microbatches=2"),
        ("gpt-tiny", "pipeline=2 inner=1x2/2x1 microbatches=4 schedule=gpipe recompute=full:1"),
        ("gpt-tiny:tied=true", "pipeline=2 inner=2x1/1x2 microbatches=4 schedule=zb-h1 zero=1"),
        ("gpt-tiny", "pipeline=2 inner=4x1/2x2 microbatches=2 zero=3"),
        ("unet-tiny", "pipeline=2 inner=2x1/1x2 spatial=2 microbatches=2 zero=2"),
        ("unet-tiny", "pipeline=3 inner=2x1/1x2/2x1 microbatches=2"),
        ("unet-tiny", "pipeline=2 inner=1x2/2x1 microbatches=2 schedule=sequential"),
        ("t5-tiny", "pipeline=4 inner=2x1/1x2/1x2/2x1 microbatches=4"),
        ("resnet-tiny", "pipeline=2 inner=2x1/1x2 microbatches=2 offload=all"),
        ("moe-tiny", "pipeline=2 inner=1x2/2x1 microbatches=2"),
        ("llama-tiny", "pipeline=2 inner=2x2/4x1 microbatches=2 sequence_parallel=on"),
        (f"{ODD}:shared", "pipeline=2 inner=1x2/2x1 microbatches=2"),
        (f"{ODD}:frozen", "pipeline=2 inner=2x1/1x2 microbatches=2"),
        (f"{ODD}:two_inputs", "pipeline=2 inner=2x1/1x2 microbatches=4"),
    ],
)
def test_stages_of_different_meshes_equal_serial(name: str, layout: str) -> None:
    found = of(name).check(replace(Layout.parse(layout), precision="float64"), optimizer={"name": "adamw", "clip": 0.05})
    assert found.ok, found
    assert found.tolerance == 1e-9


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def squares(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    return output.square().mean()


def by_rows(world: World) -> float:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    plan = "pipeline=2 inner=2x1/1x2 microbatches=2 precision=float64"
    engine = shardwise.parallelize(deep, (x,), loss=squares, plan=plan, seed=0, world=world)
    return engine.step(next(iter(shardwise.shard([(x,)], engine)))).loss


def test_stages_that_have_rows_do_not_wait_for_those_that_have_all() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).double()
    want = float(squares(deep().double()(x), (x,)).detach())
    assert launch(by_rows, 4, timeout_s=60) == [pytest.approx(want, rel=1e-9)] * 4


def test_a_shared_gradient_that_replicas_count_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: tied embeddings are summed over all ranks of both stages, of which tensor ranks have the same."""
    monkeypatch.setattr(build, "gradient_shares", lambda between, sharding, mesh: {})
    found = of("gpt-tiny").check(Layout.parse("pipeline=2 inner=2x1/1x2 microbatches=2 precision=float64"))
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


def test_a_gradient_that_each_summand_has_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: what comes back whole to ranks whose gradients are summed counts on each of them."""
    monkeypatch.setattr(StageResharding, "_gradient_share", lambda self, value, name: 1.0)
    found = of("gpt-tiny").check(Layout.parse("pipeline=2 inner=1x2/2x1 microbatches=2 precision=float64"))
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


def _counted(world: World, name: str, layout: str) -> tuple[int, int]:
    """Bytes that this rank sent between meshes in a step, and those of the closed form: each tensor once a microbatch and way."""
    subject = of(name)
    plan = subject.plan(Layout.parse(f"{layout} precision=float64"))
    engine = Engine(plan, subject.source, subject.batch, subject.loss, world, seed=0)
    sent = 0
    isend = engine._world_group.isend

    def counting(x: torch.Tensor, to: int, tag: int = 0) -> CollectiveWork:
        nonlocal sent
        sent += x.numel() * x.element_size()
        return isend(x, to, tag=tag)

    engine._world_group.isend = counting  # type: ignore[method-assign]
    engine._executors.executor_cache.entries.clear()
    engine.executor = engine._executors.executor_for(plan.microbatch_sizes)
    engine.forward_backward(subject.batch)
    tensors, own = engine.rank_model.graph.tensors, engine.plan.layout
    crossings = engine.executor.crossings
    want = sum(
        tensors[c.value].size * c.dtype.itemsize * (1 + c.has_gradient) * own.microbatches
        for (a, b), those in crossings.items()
        if own.of_stage(a) != own.of_stage(b)
        for c in those
    )
    return sent, want


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "pipeline=2 inner=4x1/2x2 microbatches=2"),
        ("gpt-tiny", "pipeline=2 inner=1x2/2x1 microbatches=2"),
        ("unet-tiny", "pipeline=3 inner=2x1/1x2/2x1 microbatches=2"),
    ],
)
def test_each_element_crosses_between_meshes_once(name: str, layout: str) -> None:
    """Counted over all ranks as they send, against the sizes of what crosses: activations, and gradients where there are any."""
    of(name)
    rows = launch(lambda world: _counted(world, name, layout), Layout.parse(layout).num_ranks, timeout_s=60, show=False)
    assert sum(sent for sent, _ in rows) == rows[0][1] > 0


def test_a_checkpoint_loads_under_another_layout(tmp_path: Path) -> None:
    subject = of("gpt-tiny:tied=true")

    def run(world: World, layout: str, saves: bool) -> list[torch.Tensor]:
        plan = subject.plan(Layout.parse(f"{layout} precision=float64"))
        engine = Engine(plan, subject.source, subject.batch, subject.loss, world, seed=0 if saves else 1)
        if saves:
            engine.step(subject.batch)
            engine.save(tmp_path)
        else:
            engine.load(tmp_path)
        loss = engine.evaluate(subject.batch)
        state = engine.full_state_dict() or {}
        return [torch.tensor(loss), *(state[name] for name in sorted(state))]

    saved = launch(lambda world: [x.tolist() for x in run(world, "pipeline=2 inner=2x1/1x2 microbatches=2 zero=2", True)], 4, show=False)[0]
    loaded = launch(lambda world: [x.tolist() for x in run(world, "data=2", False)], 2, show=False)[0]
    assert saved[0] == pytest.approx(loaded[0], rel=1e-12)
    assert saved[1:] == loaded[1:]


def test_microbatches_need_not_be_equal() -> None:
    found = of("gpt-tiny").check(Layout.parse("pipeline=2 inner=2x1/1x2 microbatches=3 precision=float64"))
    assert found.ok, found
