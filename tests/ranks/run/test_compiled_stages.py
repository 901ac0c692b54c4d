"""`compile=on`: what torch computes between collectives is compiled, without a graph break, and equal to the serial model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import LayoutError
from shardwise.plan.layout import Layout
from shardwise.run.step import stage_runner
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve


class Net(nn.Module):
    """Wide enough to be cut, with batch norm and dropout, which are kernels of shardwise's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.norm, self.over = nn.LayerNorm(16), nn.BatchNorm1d(16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x)))
        x = x + F.dropout(self.over(F.silu(self.second(x))), 0.1, self.training)
        return F.cross_entropy(self.out(x), y)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 12, generator=generator), torch.randint(4, (8,), generator=generator)


@pytest.mark.parametrize("layout", ["data=2 zero=1", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2"])
def test_compiled_stages_equal_serial(layout: str) -> None:
    """Dynamo raises at a graph break (`fullgraph`), so there is none."""
    found = shardwise.verify(Net, f"{layout} compile=on", data(), steps=2, cut_everything=True)
    assert found.ok, found
    assert found.tolerance == 1e-9


def test_runs_that_are_traced_apart_equal_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cuts, without the code that the compiler writes, which takes half a minute."""
    right = torch.compile
    monkeypatch.setattr(stage_runner.torch, "compile", lambda part, **options: right(part, backend="aot_eager", **options))
    found = shardwise.verify(Net, "data=2 tensor=2 compile=on", data(), steps=2, cut_everything=True)
    assert found.ok, found


@pytest.mark.parametrize(
    ("name", "layout"), [("gpt-tiny", "context=2 attention=ring"), ("spatial_models.py:unet_line", "data=2 spatial=2")]
)
def test_pieces_of_sequences_and_images_go_with_it(monkeypatch: pytest.MonkeyPatch, name: str, layout: str) -> None:
    """Attention whose keys go round and windows over halos are kernels of shardwise's, at which a compiled run ends."""
    right = torch.compile
    monkeypatch.setattr(stage_runner.torch, "compile", lambda part, **options: right(part, backend="aot_eager", **options))
    model = resolve(str(Path(__file__).parent / name) if ":" in name else name)
    found = shardwise.verify(model.make, f"{layout} compile=on", model.batch(4), loss=model.loss, steps=2)
    assert found.ok, found
    assert found.tolerance == 1e-9


def runs(world: World) -> list[str]:
    engine = shardwise.parallelize(Net, data(), plan="data=2", seed=0, compile=True, world=world)
    assert engine.plan.layout.compile == "on"
    return [type(one).__name__ for one in engine.executor.runners[0].module.children()]  # type: ignore[attr-defined]


def test_what_is_compiled_is_what_stands_between_shardwise_s_own_kernels(ranks: Any) -> None:
    names = ranks(runs, 2)[0]
    assert names.count("OptimizedModule") >= 2
    assert names.count("GraphModule") >= 1  # batch norm over both ranks


def test_broken_twin_code_that_is_compiled_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.compile

    def wrong(part: Any, **options: Any) -> Any:
        return right(part, backend=lambda module, inputs: lambda *given: [x * (1 + 1e-7) for x in module(*given)], **options)

    monkeypatch.setattr(stage_runner.torch, "compile", wrong)
    assert not shardwise.verify(Net, "data=2 compile=on", data(), steps=1).ok


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("recompute=full compile=on", "recompute=full with compile=on is not supported; use recompute=none"),
        ("pipeline=2 microbatches=2 schedule=zb-h1 compile=on", "schedule=zb-h1 with compile=on is not supported"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(words: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(words)


def gathered(world: World) -> list[tuple[list[float], int, int]]:
    """Losses under zero=3, the most weights that were whole at a time, and those whole after a step; without compilation and with it."""
    right, seen = torch.compile, []
    torch.compile = lambda part, **options: right(part, backend="aot_eager", **options)  # type: ignore[assignment]
    for word in ("off", "on"):
        plan = f"data=2 zero=3 precision=float64 compile={word}"
        engine = shardwise.parallelize(Net, data(), plan=plan, seed=0, world=world, optimizer={"lr": 0.1})
        gatherer, most = engine._weight_gatherer, [0]
        enter = gatherer.enter_layer

        def entering(*args: Any, enter: Any = enter, gatherer: Any = gatherer, most: list[int] = most) -> None:
            enter(*args)
            most[0] = max(most[0], gatherer.gathered_bytes)

        gatherer.enter_layer = entering  # type: ignore[method-assign]
        losses = [float(engine.step(data()).loss) for _ in range(3)]
        seen.append((losses, most[0], gatherer.gathered_bytes))
    torch.compile = right
    return seen


def test_layers_are_compiled_inside_of_what_gathers_their_weights(ranks: Any) -> None:
    off, on = ranks(gathered, 2)[0]
    assert on[0] == pytest.approx(off[0], rel=1e-12)
    assert on[1:] == off[1:]
    assert on[2] == 0
