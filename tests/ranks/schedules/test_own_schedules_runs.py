"""Schedules of the user's own at work: what the named ones do, and equal to the serial model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.cli.schedule import without_transfers
from shardwise.errors import RankError
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.schedules import build
from shardwise.world.world import World

SAMPLES = 10


class Blocks(nn.Module):
    """Batch norm tells the order of microbatches; the first block's output is read by the last, too; an auxiliary loss besides."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        first = x = self.blocks[0](x)
        for block in self.blocks[1:-1]:
            x = x + block(x)
        return self.blocks[-1](x * first + weight).square().mean() + 0.1 * first.abs().mean()


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(SAMPLES, 6, generator=generator) for name in ("x", "weight")}


def _step(world: World, layout: Layout | str) -> dict[str, Tensor] | None:
    """The loss, gradients, statistics and weights after two steps and a smaller batch, in float64."""
    plan = shardwise.plan(Blocks, _batch(), cluster="1xcpu-2", layout=layout)
    engine = Engine(plan, Blocks, _batch(), None, world, {"name": "sgd", "lr": 0.1}, seed=0)
    losses = [engine.step(_batch()).loss for _ in range(2)]
    losses.append(engine.step({name: x[:6] for name, x in _batch().items()}).loss)
    gradients, state = engine.full_gradients(), engine.full_state_dict()
    if gradients is None or state is None:
        return None
    return {"losses": torch.tensor(losses), **{f"gradient of {name}": x.clone() for name, x in gradients.items()}, **state}


def _compare(world: World, names: list[str]) -> list[str]:
    """What differs between a schedule by name and from a file."""
    wrong = []
    for name in names:
        layout = Layout(pipeline=2, microbatches=2 if name == "gems-mast" else 4, schedule=name, precision="float64",
                        chunks=2 if name == "interleaved" else 1)  # fmt: skip
        program = build(name, layout.num_stages, layout.microbatches, chunks=layout.chunks)
        mine = layout.with_schedule("mine.txt", str(without_transfers(program)))
        named, own = _step(world, layout), _step(world, mine)
        if named is not None and own is not None:
            wrong += [f"{name}: {key}" for key in named if not torch.allclose(named[key], own[key], rtol=1e-12, atol=1e-14)]
    return wrong


def test_a_named_schedule_from_a_file_computes_the_same(ranks: Callable[..., list[Any]]) -> None:
    """That the programs are equal for every name stands in `tests/pure/schedules/test_own_schedules.py`."""
    assert ranks(_compare, 2, ["zb-v", "gems-master"])[0] == []


# A stage on both ranks for unequal numbers of microbatches; three stages on two ranks; microbatches out of order; backward in parts.
REPLICAS = "0F0 1F0 1B0 0B0 0F1 0F3 0B3 0B1\n0F2 1F2 1B2 1F1 1F3 1B3 1B1 0B2"
UNEVEN = "0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2\n1F1 1F0 2F1 2B1 2F0 2I0 1B1 1I0 2W0 1W0 1F2 1F3 2F3 2B3 1B3 2F2 2B2 1B2"
LATE = "0F2 0F0 0F1 0F3 0I2 0I0 0W2 0I1 0W0 0I3 0W1 0W3\n1F2 1F0 1B2 1B0 1F1 1B1 1F3 1B3"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (REPLICAS, ""),
        (UNEVEN, "recompute=full:1 offload=optimizer"),
        (LATE, ""),
        (REPLICAS, "data=2 zero=1"),
        (UNEVEN, "data=2 zero=3"),
        (LATE, "tensor=2 recompute=full"),
        (LATE, "data=2 zero=2 offload=activations"),
    ],
)
def test_a_schedule_by_hand_equals_the_serial_model(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten samples in four microbatches: 3, 3, 2 and 2."""
    monkeypatch.chdir(tmp_path)
    Path("mine.txt").write_text(text)
    batch = {name: torch.cat([x, x.flip(0).roll(1, 1)]) for name, x in _batch().items()} if "data=2" in words else _batch()
    found = shardwise.verify(Blocks, f"pipeline=2 microbatches=4 schedule=mine.txt {words}", batch)
    assert found.ok, found


def _parallelized(world: World, folder: str) -> tuple[float, float]:
    """Only rank 0 has the file."""
    import os

    os.chdir(folder if world.rank == 0 else "/")
    engine = shardwise.parallelize(Blocks, _batch(), plan="pipeline=2 microbatches=4 schedule=mine.txt", seed=0, world=world)
    named = shardwise.parallelize(Blocks, _batch(), plan="pipeline=2 microbatches=4", seed=0, world=world)
    return engine.step(_batch()).loss, named.step(_batch()).loss


def test_parallelize_takes_a_file_that_rank_0_has(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(LATE)
    for own, named in ranks(_parallelized, 2, str(tmp_path)):
        assert own == pytest.approx(named, rel=1e-6)
    (tmp_path / "mine.txt").write_text("0F0 0B0\n1F0 1B0")
    with pytest.raises(RankError, match=r"schedule=mine\.txt runs 1 microbatch, and microbatches=4; use microbatches=1"):
        ranks(_parallelized, 2, str(tmp_path))
