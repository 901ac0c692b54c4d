"""Batches that do not divide into their microbatches: equal to the serial model in float64 for every schedule, and broken twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import Infeasible, RankError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.step import executors
from shardwise.run.step.executor import MicrobatchRunners
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.traced import of

BATCH = 10


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "pipeline=2 microbatches=4 schedule=sequential"),
        ("gpt-tiny", "data=2 tensor=2 pipeline=2 microbatches=3 zero=1"),
        ("gpt-tiny", "tensor=2 microbatches=4 recompute=full sequence_parallel=on"),
        ("gpt-tiny", "pipeline=4 microbatches=3 recompute=selective"),
        ("gpt-tiny", "pipeline=2 microbatches=4 schedule=gems-master"),
        ("gpt-tiny", "data=2 pipeline=2 microbatches=4 schedule=zb-h1 zero=3"),
        ("t5-tiny", "pipeline=2 microbatches=4 schedule=gpipe recompute=full"),
        ("t5-tiny", "pipeline=2 chunks=2 microbatches=3 schedule=interleaved"),
        ("t5-tiny", "pipeline=2 microbatches=4 schedule=zb-v offload=all"),
        ("resnet-tiny", "pipeline=2 microbatches=4 schedule=chimera"),
        ("resnet-tiny", "data=2 microbatches=3 recompute=full"),
        ("resnet-tiny", "tensor=2 pipeline=2 microbatches=4"),
        ("moe-tiny", "data=2 microbatches=2 zero=2"),
        ("unet-tiny", "pipeline=4 microbatches=4 schedule=zb-h2"),
    ],
)
def test_unequal_microbatches_equal_serial(name: str, layout: str) -> None:
    found = of(name, BATCH).check(replace(Layout.parse(layout), precision="float64"), eager="free links" if "tensor" in layout else "")
    assert found.ok, found
    assert found.tolerance == 1e-9


def test_microbatches_that_count_alike_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: the mean of the microbatches' losses, whatever their sizes, is not the mean of the samples'."""
    monkeypatch.setattr(executors, "MicrobatchRunners", lambda runners, crossings, share: MicrobatchRunners(runners, crossings, 0.25))
    found = of("gpt-tiny", BATCH).check(Layout.parse("pipeline=2 microbatches=4 precision=float64"))
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


class Normed(nn.Module):
    """Batch norm between two products, so that samples of one microbatch meet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.second(torch.tanh(self.norm(self.first(x)))), y)


def _rows(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 6, dtype=torch.float64, generator=generator), torch.randint(0, 3, (samples,), generator=generator)


def _serial(samples: int, sizes: tuple[int, ...]) -> tuple[float, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Normed().double()
    x, y = _rows(samples)
    total = sum(model(*part) * (size / samples) for size, part in zip(sizes, zip(x.split(sizes), y.split(sizes), strict=True), strict=True))
    assert isinstance(total, torch.Tensor)
    total.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(total.detach()), found | {name: b for name, b in model.named_buffers() if b.is_floating_point()}


def _last_batches(world: World, layout: str, cases: list[tuple[int, tuple[int, ...]]]) -> list[float]:
    """Of each case, the largest difference between the engine's loss, gradients and buffers and the serial model's."""
    chosen = Layout.parse(f"{layout} precision=float64")
    stages = ("norm/batch_norm",) if chosen.pipeline > 1 else ()
    made = Engine(Plan(chosen, "normed", "here", 12, stages), Normed, _rows(12), None, world, seed=0)
    found = []
    for samples, sizes in cases:
        for name, b in made.rank_model.buffers.items():
            b.fill_(1.0 if name.endswith("var") else 0.0)
        result = made.forward_backward(_rows(samples), is_global_batch=True)
        loss, gradients, state = made.loss_of(result), made.full_gradients(), made.full_state_dict()
        if gradients is not None and state is not None:
            want_loss, want = _serial(samples, sizes)
            got = gradients | {name: state[name] for name in state if "running" in name}
            worst = max(float((got[name] - want[name]).abs().max()) for name in want)
            found.append(max(worst, abs(loss - want_loss)))
    return found


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        ("pipeline=2 microbatches=4", [(12, (3, 3, 3, 3)), (11, (3, 3, 3, 2)), (7, (3, 2, 2)), (2, (2,)), (12, (3, 3, 3, 3))]),
        ("pipeline=2 microbatches=4 schedule=chimera", [(11, (3, 3, 3, 2)), (5, (3, 2))]),
        ("data=2 microbatches=3", [(12, (4, 4, 4)), (10, (4, 4, 2)), (6, (4, 2)), (4, (4,))]),
    ],
)
def test_the_last_batch_of_an_epoch_is_smaller(layout: str, cases: list[tuple[int, tuple[int, ...]]]) -> None:
    """Steps on fewer samples than the plan's, in fewer microbatches where there are too few: mean loss, gradients, running statistics.

    Each size after the other on one engine: what one leaves is not in the next.
    """
    ranks = Layout.parse(layout).num_ranks
    found = launch(lambda world: _last_batches(world, layout, cases), ranks, timeout_s=60, show=False)[0]
    assert len(found) == len(cases)
    assert max(found) < 1e-12, found


def _evaluated(world: World) -> tuple[float, float]:
    """Losses on 5 of 12 samples: of the engine, and of the same weights in one process."""
    made = Engine(Plan(Layout.parse("pipeline=2 microbatches=4 precision=float64"), "n", "here", 12, ("norm/batch_norm",)), Normed,
                  _rows(12), None, world, seed=0)  # fmt: skip
    made.step(_rows(12))
    got = made.evaluate(_rows(5), is_global_batch=True)
    state = made.full_state_dict()
    if state is None:
        return got, got
    model = Normed().double().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return got, float(model(*_rows(5)))


def test_fewer_samples_are_evaluated() -> None:
    for got, want in launch(_evaluated, 2, timeout_s=60, show=False):
        assert got == pytest.approx(want, abs=1e-12)


class Branching(nn.Module):
    """Computes something else with four samples than with three."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.weight(x)
        return (found.exp() if x.shape[0] > 3 else found).mean()


def _engine_on(layout: str, model: Callable[[], nn.Module], batch: Any, size: int) -> Callable[[World], None]:
    return lambda world: Engine(Plan(Layout.parse(layout), "m", "here", size), model, batch, None, world, seed=0) and None


def test_what_cannot_be_is_refused_with_its_numbers() -> None:
    with pytest.raises(Infeasible, match="a batch of 10 samples has 2 for each of data=4, which are too few for microbatches=3"):
        Plan(Layout.parse("data=4 microbatches=3"), "test", "here", 10)
    with pytest.raises(Infeasible, match=r"9 samples does not divide into data=2 equal shares; .* such as 8, .*: this model runs whole"):
        Plan(Layout.parse("data=2"), "test", "here", 9, uncaptured="it branches")
    with pytest.raises(Infeasible, match="a batch of 6 samples has 3 for each of data=2, which are too few for microbatches=4"):
        Plan(Layout.parse("data=2 microbatches=4"), "test", "here", 6)
    with pytest.raises((Infeasible, RankError), match="of 3 samples the model computes something else than with 4, first at /exp"):
        launch(_engine_on("microbatches=2 precision=float32", Branching, (torch.randn(7, 6),), 7), 1, timeout_s=60, show=False)
