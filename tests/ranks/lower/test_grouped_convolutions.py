"""Convolutions in groups over tensor ranks: each rank has whole groups, and equals the serial model in every composition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.lower import operator_lowering, trial
from shardwise.ops.vocabulary import LoweringKind
from shardwise.run.verify.verify import Verification


class Blocks(nn.Module):
    """Pointwise, depthwise with two channels made of each, in four groups of four and six, spread in two: as ResNeXt and MobileNet."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.widen = nn.Conv2d(3, 8, 1)
        self.deep = nn.Conv2d(8, 16, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.mixed = nn.Conv2d(16, 24, 3, stride=2, padding=1, groups=groups)
        self.narrow = nn.Conv2d(24, 8, 1)
        self.spread = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=4)
        self.line = nn.Conv1d(12, 12, 4, padding=3, groups=12)  # as state-space models have it
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.deep(torch.relu(self.widen(x)))))
        x = self.spread(torch.relu(self.narrow(self.mixed(x)))).flatten(2)
        y: Tensor = self.head(self.line(x)[..., : x.shape[-1]].mean(-1))
        return y


def verified(layout: str, groups: int = 4, **options: Any) -> Verification:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(8, 3, 6, 6, generator=generator), torch.randint(5, (8,), generator=generator)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    return shardwise.verify(lambda: Blocks(groups), layout, batch, loss=loss, cut_everything=True, **options)


@pytest.mark.parametrize("layout", ["tensor=2", "tensor=4", "data=2 tensor=2 zero=2", "pipeline=2 tensor=2 schedule=zb-h1 microbatches=2"])
def test_groups_over_tensor_ranks_equal_serial(layout: str) -> None:
    found = verified(layout)
    assert found.ok, found
    assert found.tolerance == 1e-9
    assert found.divided["tensor"]["flops"] > 0.95, found.divided
    assert found.divided["tensor"]["parameters"] > 0.9, found.divided


def test_groups_that_do_not_divide_are_cut_unevenly() -> None:
    """Of eight groups three ranks have 3, 3 and 2, of 16 channels in four groups 2, 1 and 1 groups."""
    found = verified("tensor=3")
    assert found.ok, found
    assert found.divided["tensor"]["flops"] > 0.6, found.divided


def test_fewer_groups_than_ranks_are_not_cut() -> None:
    """16 and 24 channels divide by 4, but two groups of them do not."""
    found = verified("tensor=4", groups=2)
    assert found.ok, found
    assert found.divided["tensor"]["flops"] < 0.9, found.divided


def test_broken_twin_with_the_groups_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lowered operator is tried first, it is computed whole; where it is not, torch's own error ends the run."""
    monkeypatch.setitem(operator_lowering.LOWERINGS, LoweringKind.GROUPED_CONVOLUTION, lambda call: None)
    found = verified("tensor=2")
    assert found.ok
    assert found.divided["tensor"]["flops"] < 0.2
    monkeypatch.setattr(trial, "_needs_trial", lambda op: False)
    with pytest.raises(shardwise.errors.RankError, match="groups"):
        verified("tensor=2")
