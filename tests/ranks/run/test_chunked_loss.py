"""loss_chunks: loss, gradients and updated weights are the serial model's under every axis, and twins that lose a chunk are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.errors import LayoutError
from shardwise.lower.kernels import chunked_loss
from shardwise.plan.layout import Layout
from tests.support.verified_models import Subject

ROOT = Path(__file__).resolve().parents[3]
NUM_CLASSES = 24


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "loss_chunks=2"),
        ("gpt-tiny", "data=2 microbatches=2 loss_chunks=3"),  # rows that do not divide
        ("gpt-tiny", "tensor=2 loss_chunks=3"),
        ("gpt-tiny", "tensor=2 sequence_parallel=on microbatches=2 loss_chunks=2"),
        ("gpt-tiny", "pipeline=2 microbatches=4 loss_chunks=3"),
        ("gpt-tiny", "data=2 pipeline=2 microbatches=4 schedule=zb-h1 zero=1 loss_chunks=2"),
        ("gpt-tiny", "data=2 zero=3 recompute=full loss_chunks=3"),
        ("gpt-tiny", "data=2 zero=1 recompute=cheap loss_chunks=2"),
        ("gpt-tiny", "data=2 tensor=2 pipeline=2 microbatches=2 zero=1 loss_chunks=3"),
        ("gpt-tiny", "context=2 loss_chunks=2"),
        ("gpt-tiny", "loss_chunks=100000"),  # more chunks than rows
        ("hf:tests/torch/hf/llama.json", "data=2 loss_chunks=3"),
        ("hf:tests/torch/hf/llama.json", "tensor=2 loss_chunks=2"),
        ("hf:tests/torch/hf/gpt2.json", "pipeline=2 microbatches=2 loss_chunks=3"),
    ],
)
def test_it_equals_the_serial_model(subject: Callable[[str], Subject], name: str, layout: str) -> None:
    found = subject(name).check(replace(Layout.parse(layout), precision="float64"), eager="free links")
    assert found.ok, found.first_difference


def test_in_sixteen_bits_it_is_as_near_as_those_are() -> None:
    found = shardwise.verify("gpt-tiny", "data=2 loss_chunks=3 precision=bfloat16-mixed")
    assert found.ok, found.first_difference


_RANGES, _GRADIENT = chunked_loss.ChunkedLossCall.ranges, chunked_loss._logits_gradient


def _without_the_last(call: Any, num_rows: int) -> Iterator[slice]:
    yield from [*_RANGES(call, num_rows)][:-1]


def _scaled(*args: Any) -> Tensor:
    return _GRADIENT(*args) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("place", "name", "twin"),
    [(chunked_loss.ChunkedLossCall, "ranges", _without_the_last), (chunked_loss, "_logits_gradient", _scaled)],
)
@pytest.mark.parametrize("layout", ["data=2 loss_chunks=2", "tensor=2 loss_chunks=3"])
def test_a_chunk_that_is_dropped_or_scaled_is_found(
    subject: Callable[[str], Subject], monkeypatch: pytest.MonkeyPatch, place: Any, name: str, twin: Any, layout: str
) -> None:
    monkeypatch.setattr(place, name, twin)
    assert not subject("gpt-tiny").check(replace(Layout.parse(layout), precision="float64"), eager="free links").ok


class Head(nn.Module):
    """Logits [samples, positions, classes]."""

    def __init__(self, has_bias: bool = True) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, NUM_CLASSES, bias=has_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


def cross_entropy_of_rows(logits: Tensor, batch: dict[str, Tensor], **options: Any) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), **options)


LOSSES: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "ignored": lambda out, batch: cross_entropy_of_rows(out, batch, ignore_index=3),
    "sum": lambda out, batch: cross_entropy_of_rows(out, batch, reduction="sum") / 100,
    "smoothed": lambda out, batch: cross_entropy_of_rows(out, batch, label_smoothing=0.1),
    "weighted": lambda out, batch: cross_entropy_of_rows(out, batch, weight=torch.linspace(0.5, 1.5, NUM_CLASSES).to(out.dtype)),
    "classes first": lambda out, batch: functional.cross_entropy(out.transpose(1, 2), batch["labels"]),
    "shifted": lambda out, batch: functional.cross_entropy(out[:, :-1].reshape(-1, NUM_CLASSES), batch["labels"][:, 1:].reshape(-1)),
    "capped": lambda out, batch: cross_entropy_of_rows((torch.tanh(out / 3.0) * 3.0).float(), batch),
}


def make_batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, NUM_CLASSES, (4, 7), generator=draw) for name in ("tokens", "labels")}


@pytest.mark.parametrize("layout", ["loss_chunks=3", "data=2 microbatches=2 loss_chunks=3", "tensor=2 loss_chunks=2"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_form_of_the_loss_equals_the_serial_one(loss: str, layout: str) -> None:
    found = shardwise.verify(Head, layout, make_batch(), loss=LOSSES[loss])
    assert found.ok, found.first_difference


REFUSED: dict[str, tuple[Callable[[Tensor, dict[str, Tensor]], Tensor], str]] = {
    "other loss": (lambda out, batch: out.square().mean(), "no torch.nn.functional.cross_entropy; leave loss_chunks out"),
    "read twice": (
        lambda out, batch: cross_entropy_of_rows(out, batch) + out.logsumexp(-1).square().mean(),
        "/logsumexp reads the logits of /cross_entropy_loss too",
    ),
    "probabilities": (
        lambda out, batch: functional.cross_entropy(out.flatten(0, 1), torch.softmax(out.detach().flatten(0, 1), -1)),
        "a cross-entropy of probabilities",
    ),
    "by row": (lambda out, batch: cross_entropy_of_rows(out, batch, reduction="none").mean(), "one number a row"),
    "no linear layer": (
        lambda out, batch: cross_entropy_of_rows(functional.layer_norm(out, (NUM_CLASSES,)), batch),
        "reads what /layer_norm computes, and no linear layer",
    ),
    "detached": (lambda out, batch: cross_entropy_of_rows(out.detach() + 0 * out.sum(), batch), "loss_chunks: "),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_computed_in_chunks_is_refused_by_name(case: str) -> None:
    loss, words = REFUSED[case]
    with pytest.raises(LayoutError, match=words.replace(".", r"\.")):
        shardwise.plan(Head, make_batch(), loss=loss, cluster="1xcpu-2", layout="data=2 loss_chunks=2")


def test_keys_and_loops_that_do_not_go_with_it_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"loss_chunks=2.*precision=float8|precision=float8.*loss_chunks"):
        Layout.parse("precision=float8 loss_chunks=2")
    with pytest.raises(LayoutError, match="loss_chunks=0"):
        Layout.parse("loss_chunks=0")
    with pytest.raises(LayoutError, match=r"plain loop.*leave loss_chunks out"):
        shardwise.auto_parallelize(Head(), make_batch(), plan="data=1 loss_chunks=2")
    assert str(Layout.parse("data=2 loss_chunks=4")) == "data=2 tensor=1 pipeline=1 loss_chunks=4"
