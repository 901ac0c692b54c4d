"""What a stage sent is gone before its backward, unless an operator of the stage keeps it: counted by a rank's accounts, in closed form,
and as the prices count it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.capture.capture import capture
from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.plan.ir.program import Recv
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.step import dispatch, executor, stage_runner
from shardwise.world.world import World

ROWS, WIDTH, BLOCKS, MICROBATCHES = 128, 128, 4, 4
UNIT = ROWS * WIDTH * 4  # bytes of one activation of one microbatch
CUT = (f"blocks.{BLOCKS // 2}.up/linear",)
KEEPS = 3  # of the first stage's two blocks: two of tanh and what the second block reads; the batch is there anyway
IN_FLIGHT = {"1f1b": [2, 2, 2, 1], "zb-h1": [2, 2, 2, 1]}  # whenever a gradient has come


class Block(nn.Module):
    """Its products keep what they read; the sum, which is what leaves, is kept by nothing in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _layout(schedule: str) -> Layout:
    return Layout.parse(f"pipeline=2 microbatches={MICROBATCHES} schedule={schedule}")


def _batch() -> Tensor:
    return torch.randn(MICROBATCHES * ROWS, WIDTH)


def kept_between(world: World, small_bytes: int) -> dict[str, list[float]]:
    """By schedule: activations of this rank, in sizes of one, whenever a gradient has come and all that it sent is gone. Outputs of less
    than `small_bytes` are held by name."""
    running: list[Any] = []

    def begin(*args: Any) -> Any:
        running.append(dispatch.StepState(*args))
        return running[-1]

    kept: dict[str, list[float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "StepState", begin)
        patch.setattr(stage_runner, "SMALL_BYTES", small_bytes)
        for schedule in IN_FLIGHT:
            x, found = _batch(), kept.setdefault(schedule, [])
            engine = Engine(Plan(_layout(schedule), "blocks", "here", len(x), CUT), Blocks, (x,), None, world, seed=0)

            def look(action: Any, held: list[object], engine: Engine = engine, found: list[float] = found) -> None:
                if isinstance(action, Recv) and action.value.name == "g":
                    while running[-1].sends:
                        running[-1].sends.popleft().wait()
                    found.append(engine.memory.current().activations / UNIT)

            engine.executor.on_action = look
            engine.step((x,))
    return kept


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize(("small_bytes", "outputs"), [(stage_runner.SMALL_BYTES, 0), (1 << 40, 1)], ids=["", "held by name"])
def test_what_was_sent_is_not_kept_for_backward(ranks: Callable[..., list[Any]], small_bytes: int, outputs: int) -> None:
    """A twin that holds what it sent, as a stage does where that is small, has one activation more of each microbatch."""
    first, _ = ranks(kept_between, 2, small_bytes)
    assert first == {name: [(KEEPS + outputs) * n for n in numbers] for name, numbers in IN_FLIGHT.items()}


@pytest.mark.parametrize("schedule", IN_FLIGHT)
def test_prices_do_not_count_what_was_sent(schedule: str) -> None:
    x, layout = _batch(), _layout(schedule)
    pricer = Pricer(capture(Blocks(), (x,)).graph, Cluster.parse("1xcpu-2"), len(x))
    assert pricer.stages(layout, CUT)[0].memory.saved_bytes == KEEPS * UNIT
