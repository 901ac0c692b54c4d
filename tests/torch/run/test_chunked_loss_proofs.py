"""Proofs of losses in chunks in exact arithmetic, and what is off in one chunk only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.lower.kernels import chunked_loss
from shardwise.run.prove.proof import Proof

BATCH = tuple(torch.randint(0, 12, (4, 3), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


class Tagger(nn.Module):
    """Two layers and a head, with their loss; one class is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down, self.head = nn.Embedding(12, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(functional.gelu(self.up(x)))
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), ignore_index=5)


def prove_layouts(*layouts: str) -> tuple[Proof, ...]:
    proofs = shardwise.prove(Tagger, list(layouts), BATCH, max_error_probability=0.1)
    assert isinstance(proofs, tuple)
    return proofs


def test_layouts_are_equal() -> None:
    for proof in prove_layouts(
        "loss_chunks=5",
        "data=2 microbatches=2 loss_chunks=2",
        "tensor=2 loss_chunks=3",
        "tensor=2 sequence_parallel=on zero=0 loss_chunks=2",
        "pipeline=2 microbatches=2 schedule=zb-h1 loss_chunks=2",
        "data=2 zero=3 loss_chunks=4",
    ):
        assert proof.ok, proof
        assert proof.error_probability <= 1e-2


_RANGES, _GRADIENT, _PRODUCT = chunked_loss.ChunkedLossCall.ranges, chunked_loss._logits_gradient, chunked_loss._add_product


def _without_the_first(call: Any, num_rows: int) -> Iterator[slice]:
    yield from [*_RANGES(call, num_rows)][1:]


def _scaled_once() -> Any:
    calls: list[int] = []

    def scaled(*args: Any) -> Tensor:
        calls.append(1)
        is_first = len(calls) == 1  # before ranks take turns
        return _GRADIENT(*args) * (1 + 2.0**-40 * is_first)

    return scaled


def _last_only(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return _PRODUCT(None, a, b)


@pytest.mark.parametrize("twin", ["dropped", "scaled", "last"])
@pytest.mark.parametrize("layout", ["data=2 loss_chunks=2", "tensor=2 loss_chunks=3"])
def test_one_chunk_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch, twin: str, layout: str) -> None:
    place, name, broken = {
        "dropped": (chunked_loss.ChunkedLossCall, "ranges", _without_the_first),
        "scaled": (chunked_loss, "_logits_gradient", _scaled_once()),
        "last": (chunked_loss, "_add_product", _last_only),
    }[twin]
    monkeypatch.setattr(place, name, broken)
    (proof,) = prove_layouts(layout)
    assert not proof.ok
