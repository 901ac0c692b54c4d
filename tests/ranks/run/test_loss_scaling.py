"""float16 with a scaled loss: the steps that overflow are skipped as torch's GradScaler skips them, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import LayoutError
from shardwise.plan.layout import Layout
from shardwise.run.state.precision import LossScale
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

Ranks = Callable[..., list[Any]]
STEPS = 6


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))


class Large(nn.Module):
    """A loss with a large gradient at one sample: scaled by 65536 it is no float16, until it has been halved three times."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return (self.net(x).float().sin() * weight).sum()


def data() -> tuple[Tensor, Tensor]:
    weight = torch.full((8, 1), 1e-3)
    weight[3] = 5.0
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), weight


def by_torch(clip: float = 0.0) -> tuple[list[float], dict[str, Tensor]]:
    """Scales after each step, and weights, of torch's own loop."""
    torch.manual_seed(0)
    net = Large()
    optimizer, scaler = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True), torch.amp.GradScaler("cpu")
    scales = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net(*data())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, net.state_dict()


def by_shardwise(
    world: World, layout: str, folder: str = "", clip: float = 0.0
) -> tuple[list[float], dict[str, Tensor] | None, list[float]]:
    """The same of an engine, which goes on in `folder` from a checkpoint of another layout in the middle. With the optimizer's steps."""
    scales: list[float] = []
    optimizer = {"name": "adamw", "lr": 1e-2, "clip": clip}

    def engine(words: str) -> Any:
        return shardwise.parallelize(Large, data(), plan=words, optimizer=optimizer, seed=0, world=world)

    now = engine(f"data={world.num_ranks} precision=float16" if folder else layout)
    for step in range(STEPS):
        if folder and step == 4:
            now.save(folder)
            now = engine(layout)
            now.load(folder)
        now.step(data())
        scales.append(now.loss_scale.factor)
    return scales, now.full_state_dict(), [float(s["step"]) for s in now._optimizer.inner.state.values()]


def test_one_rank_skips_and_updates_as_torch_does(ranks: Ranks) -> None:
    wanted, weights = by_torch()
    scales, state, _ = ranks(by_shardwise, 1, "data=1 precision=float16")[0]
    assert wanted[:3] == [2.0**15, 2.0**14, 2.0**13]  # the data make three steps overflow
    assert wanted[-1] == 2.0**13
    assert scales == wanted
    assert state is not None
    for name, tensor in weights.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    ("layout", "clip"),
    [
        ("data=2", 0.0),
        ("data=2 zero=1", 1.0),
        ("data=2 zero=3 offload=optimizer", 1.0),
        ("pipeline=2 microbatches=2", 0.0),
        ("pipeline=2 microbatches=4 schedule=zb-h1", 1.0),
        ("tensor=2 recompute=full", 1.0),
    ],
)
def test_all_ranks_skip_the_same_steps(ranks: Ranks, layout: str, clip: float, tmp_path: Path) -> None:
    """With and without a norm to vote by; continued from another layout's checkpoint, with the scale and what Adam has counted."""
    wanted, weights = by_torch(clip)
    plan = f"{layout} precision=float16"
    for scales, _, steps in ranks(by_shardwise, 2, plan, str(tmp_path), clip):
        assert scales == wanted
        assert set(steps) == {3.0}
    state = ranks(by_shardwise, 2, plan, "", clip)[0][1]
    assert state is not None
    for name, tensor in weights.items():
        assert float((state[name] - tensor).abs().max()) < 2e-3, name  # a fifth of an update


def test_the_scale_grows_as_torchs_does() -> None:
    torch_scaler, mine = torch.amp.GradScaler("cpu"), LossScale(torch.device("cpu"), "float16")
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    torch_scaler.scale(torch.ones(()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(6000):
        overflows = bool(torch.rand((), generator=generator) < 0.0004)
        parameter.grad = torch.full((1,), float("inf") if overflows else 1.0)
        torch_scaler.unscale_(optimizer)
        torch_scaler.step(optimizer)
        torch_scaler.update()
        mine.update(overflows)
        assert mine.factor == torch_scaler.get_scale()
    assert mine.num_skipped > 0


def goes_on_wider(world: World, folder: str) -> tuple[int, float]:
    """Steps that Adam has counted after a float16 run went on in float32, and the scale of a float16 run that goes on from that."""
    by_shardwise(world, "data=1 precision=float16", folder)
    plans = "data=1 precision=float32", "data=1 precision=float16"
    wider, narrow = (shardwise.parallelize(Large, data(), plan=plan, seed=0, world=world) for plan in plans)
    wider.load(folder)
    wider.step(data())
    wider.save(folder)
    narrow.load(folder)
    return int(next(iter(wider._optimizer.inner.state.values()))["step"]), narrow.loss_scale.factor


def test_a_float32_run_goes_on_from_a_float16_one_and_back(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(goes_on_wider, 1, str(tmp_path)) == [(2, 2.0**13)]  # 4 steps were saved, 3 of them skipped


def test_broken_twin_gradients_that_stay_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LossScale.unscale

    def only_checks(self: LossScale, gradients: Any) -> None:
        right(self, [x.clone() for x in gradients])

    monkeypatch.setattr(LossScale, "unscale", only_checks)
    model = resolve("gpt-tiny")
    assert not shardwise.verify(model.make, "data=2", model.batch(4), loss=model.loss, dtype="float16", steps=1).ok


def test_a_plan_for_v100_is_one_that_runs() -> None:
    """Where a device has no bfloat16 the planner takes float16 by itself, where it takes bfloat16 on A100; and the plan runs here."""
    model, batch = resolve("gpt-tiny"), 8
    plans = {
        name: shardwise.plan(model.make, model.batch(batch), loss=model.loss, cluster=name, constraints="data=2 tensor=1 pipeline=1")
        for name in ("1xp3.16xlarge", "1xp4d.24xlarge")
    }
    assert [plan.layout.precision for plan in plans.values()] == ["float16", "bfloat16"]
    plan = plans["1xp3.16xlarge"]
    found = shardwise.verify(model.make, plan, model.batch(batch), loss=model.loss, dtype="float16")
    assert found.ok, found


def in_a_loop(world: World, layout: str) -> list[tuple[float, float]]:
    """(scale, loss) of each step of the user's own loop with torch's GradScaler."""
    (x, _), found = data(), []
    torch.manual_seed(0)
    with shardwise.auto_parallelize(batch=(x,), plan=layout, world=world) if layout else nullcontext():
        net = network()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    rows = x if not layout else next(iter(shardwise.shard([(x,)])))[0]
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=not layout):
            output = net(rows)
        assert output.dtype is torch.float16
        loss = 5 * (output.float() - 1).sin().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append((float(scaler.get_scale()), float(loss.detach())))
    return found


@pytest.mark.parametrize("layout", ["data=2", "tensor=2"])
def test_a_loop_of_ones_own_scales_as_torch_does(ranks: Ranks, layout: str) -> None:
    wanted = ranks(in_a_loop, 1, "")[0]
    got = ranks(in_a_loop, 2, f"{layout} precision=float16")
    for of_rank in got:
        assert [scale for scale, _ in of_rank] == [scale for scale, _ in wanted]
    losses = [sum(losses) / 2 for losses in zip(*([loss for _, loss in one] for one in got), strict=True)]
    assert losses == pytest.approx([loss for _, loss in wanted], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data=2 precision=float16 compress=int8", "compress=int8 precision=float16: what is kept back"),
        ("data=2 precision=float16 staleness=1", "precision=float16 with staleness=1 is not supported; use precision=float32 or"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(words: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(words)
