"""Weights that are made of parameters before a product reads them (transposed, normed, by a power iteration) are cut as others are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import shardwise
from shardwise.model.dims import labels
from shardwise.run.verify.verify import Verification


class Turned(nn.Linear):
    """As Falcon's."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Adapted(nn.Linear):
    """With a product of two narrow matrices added, as LoRA merges them."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__(i, o)
        self.down, self.up = nn.Parameter(torch.randn(2, i)), nn.Parameter(torch.randn(o, 2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight + self.up @ self.down, self.bias)


def _weight_norm(i: int, o: int) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(i, o))


def _norm_of_columns(i: int, o: int) -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(i, o), dim=1)


def _spectral_norm(i: int, o: int) -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(i, o))


class _Line(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.line = nn.utils.weight_norm(nn.Conv1d(i, o, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.line(x.transpose(1, 2))
        return y.transpose(1, 2)


MADE: dict[str, Callable[[int, int], nn.Module]] = {
    "transposed": Turned,
    "adapted": Adapted,
    "weight norm": _weight_norm,
    "norm of columns": _norm_of_columns,
    "spectral norm": _spectral_norm,
    "weight norm of a convolution": _Line,
}


def verified(name: str, layout: str) -> Verification:
    batch = (torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(0)),)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output - 1).square().mean()

    def make() -> nn.Module:
        return nn.Sequential(MADE[name](6, 12), nn.GELU(), MADE[name](12, 6), nn.GELU(), MADE[name](6, 12))

    return shardwise.verify(make, layout, batch, loss=loss, cut_everything=True)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("layout", ["tensor=2", "tensor=4"])
def test_weights_that_are_made_are_cut(name: str, layout: str) -> None:
    found = verified(name, layout)
    assert found.ok, found
    assert found.tolerance == 1e-9
    assert found.divided["tensor"]["flops"] > (0.95 if layout == "tensor=2" else 0.8), found.divided


@pytest.mark.parametrize("name", ["transposed", "weight norm", "spectral norm"])
@pytest.mark.parametrize("layout", ["data=2 tensor=2 zero=2", "pipeline=2 tensor=2 microbatches=2 schedule=1f1b", "tensor=2x2"])
def test_in_every_composition(name: str, layout: str) -> None:
    found = verified(name, layout)
    assert found.ok, found


def test_twin_that_knows_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_derived_weights", lambda graph: set())
    found = verified("weight norm", "tensor=2")
    assert found.ok
    assert found.divided["tensor"]["flops"] == 0.0
