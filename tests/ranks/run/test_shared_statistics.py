"""Running statistics that several layers write: in one stage as the serial run, in two refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import LayoutError


class _SharedNorm(nn.Module):
    """One batch norm after each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.norm(layer(x)))
        return F.cross_entropy(x, y)


def _batch() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 8, generator=g, dtype=torch.float64), "y": torch.randint(8, (8,), generator=g)}


def _train(world: Any, layout: str, stages: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """State after two steps; `stages`: the operators that begin one, in place of those that the planner takes."""
    plan = shardwise.plan(_SharedNorm, _batch(), cluster="1xcpu-2", layout=f"{layout} precision=float64")
    plan = replace(plan, stages=stages or plan.stages)
    engine = shardwise.parallelize(_SharedNorm, _batch(), plan=plan, world=world, seed=0)
    for _ in range(2):
        engine.step(_batch())
    return engine.full_state_dict() or {}


def _try_both(world: Any) -> tuple[dict[str, Tensor], str]:
    trained, refusal = _train(world, "pipeline=2 microbatches=2"), ""
    try:
        _train(world, "pipeline=2 microbatches=2", ("layers.2/linear",))
    except LayoutError as error:
        refusal = str(error)
    return trained, refusal


def test_stages_that_share_statistics_equal_serial_or_are_refused() -> None:
    found, refusal = shardwise.launch(_try_both, 2)[0]
    serial = _train(None, "microbatches=2")
    assert found.keys() == serial.keys()
    for name, expected in serial.items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-9)
    assert "no stage can begin at 'layers.2/linear': a buffer that the model writes" in refusal
