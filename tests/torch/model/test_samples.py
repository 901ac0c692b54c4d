"""Batches whose samples lie in dimension 1 are told from those where they lie in dimension 0, by what the model does along each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import Infeasible
from shardwise.model.batch.samples import misplaced_samples_reason
from shardwise.run.rank_model.model_source import ModelSource

Batch = dict[str, Tensor]


class Recurrent(nn.Module):
    """(time, samples, features) as LSTM has them by default, or samples first; the state after each sample's own last step."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(5, 6, batch_first=batch_first), nn.Linear(6, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        states, samples = self.layer(x)[0], torch.arange(len(lengths))
        return self.head(states[samples, lengths] if self.layer.batch_first else states[lengths, samples]).square().mean()


class Attending(nn.Module):
    """As torch's own layers have it, heads and samples in one dimension; a score for every position."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x).flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], dtype=torch.int64))


class Labelled(Attending):
    """A label for each sample, which the shapes of the batch tell apart from positions."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x)
        return F.cross_entropy(F.layer_norm(h.mean(1 if self.layer.self_attn.batch_first else 0), (4,)), y)


class Summing(nn.Module):
    """A running sum along time."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer, self.head, self.dim = nn.Linear(5, 4), nn.Linear(4, 3), dim

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).cumsum(self.dim).tanh()).square().sum()


class Contrasting(nn.Module):
    """Samples that the loss mixes on purpose, of two views each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.normalize(self.layer(x), dim=-1).unbind(1)
        return F.cross_entropy(first @ second.T, torch.arange(len(x)))


def real(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


CASES: list[tuple[Callable[[], nn.Module], Batch, str]] = [
    (partial(Recurrent, False), {"x": real(4, 6, 5), "lengths": torch.ones(6, dtype=torch.int64)}, "layer/lstm goes along dimension 0"),
    (partial(Recurrent, True), {"x": real(6, 4, 5), "lengths": torch.ones(6, dtype=torch.int64)}, ""),
    (partial(Attending, False), {"x": real(6, 4, 4)}, "each of the 4 in dimension 1 goes through by itself"),
    (partial(Attending, True), {"x": real(4, 6, 4)}, ""),
    (partial(Labelled, False), {"x": real(6, 8, 4), "y": torch.ones(8, dtype=torch.int64)}, "so that samples lie in dimension 1"),
    (partial(Labelled, True), {"x": real(8, 6, 4), "y": torch.ones(8, dtype=torch.int64)}, ""),
    (partial(Summing, 0), {"x": real(6, 8, 5)}, "each of the 8 in dimension 1 goes through by itself"),
    (partial(Summing, 1), {"x": real(8, 6, 5)}, ""),
    (Contrasting, {"x": real(8, 2, 5)}, ""),
]


@pytest.mark.parametrize(("make", "batch", "said"), CASES)
def test_where_samples_lie_is_told_by_what_mixes_them(make: Any, batch: Batch, said: str) -> None:
    found = misplaced_samples_reason(ModelSource.from_model(make).capture(batch, None, None).graph)
    assert said in found if found and said else found is None and not said


def test_a_batch_is_divided_along_its_samples_only() -> None:
    make, batch, said = CASES[0]
    plan = shardwise.plan(make, batch, cluster="1xcpu-2", constraints="ranks=2")
    assert (plan.layout.data, plan.layout.microbatches, plan.layout.num_ranks) == (1, 1, 2)
    assert said in dict(plan.reasons)["samples"]
    for layout in ("data=2", "pipeline=2 microbatches=2"):
        with pytest.raises(Infeasible, match=f"divides the batch along dimension 0, but {said}"):
            shardwise.plan(make, batch, cluster="1xcpu-2", layout=layout)
    with pytest.raises(Infeasible, match="no data meets data=2"):
        shardwise.plan(make, batch, cluster="1xcpu-2", constraints="data=2")


class Empty(nn.Module):
    """Keys of a past that is empty, which are reshaped before others are joined to them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        past = self.layer(x)[:, :0].unflatten(-1, (2, 2)).flatten(0, 1)
        return torch.cat((past.reshape(x.shape[0], -1, 4), self.layer(x)), 1).square().mean()


def test_what_is_empty_holds_no_samples() -> None:
    batch = {"x": torch.ones(8, 3, 4)}
    assert misplaced_samples_reason(ModelSource.from_model(Empty).capture(batch, None, None).graph) is None
