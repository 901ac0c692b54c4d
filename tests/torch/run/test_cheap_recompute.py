"""What recompute=cheap keeps and runs again: counted against the formula of a layer and against prices, and no bit of a result changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.errors import LayoutError
from shardwise.lower.kernels import random_stream
from shardwise.plan.layout import Layout
from shardwise.run.residency import cheap_recompute
from shardwise.zoo.resolve import resolve

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER, LENGTH, ROWS = 2, 64, 4, 2, 192, 16, 4
LLAMA = f"llama:vocabulary=50,sequence={LENGTH},hidden={HIDDEN},layers={LAYERS},heads={HEADS},kv_heads={KV_HEADS},inner={INNER}"
DROPPING = "gpt:layers=2,hidden=32,heads=4,sequence=16,vocabulary=64,dropout=0.3"


def _engine(model: str, layout: str) -> Any:
    return shardwise.parallelize(model, ROWS, plan=layout, seed=0, optimizer={"name": "sgd", "lr": 0.1})


def _train(model: str, layout: str) -> tuple[list[float], dict[str, Tensor], Any]:
    engine, batch = _engine(model, layout), resolve(model).batch(ROWS)
    losses = []
    for _ in range(2):
        engine.memory.reset_peak()
        losses.append(engine.step(batch).loss)
    return losses, engine.full_state_dict(), engine.memory.peak()


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-mixed", "float8"])
@pytest.mark.parametrize("model", [LLAMA, DROPPING])
def test_no_bit_changes(model: str, precision: str) -> None:
    found = [_train(model, f"data=1 microbatches=2 precision={precision} recompute={one}") for one in ("none", "cheap", "cheap:1")]
    for losses, state, _ in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(state[name], found[0][1][name]) for name in state)


def _kept_bytes(engine: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes that the layers keep of one forward: what hooks save, and what others are made from, each storage once, without parameters."""
    held: dict[int, Tensor] = {}
    parameters = {x.untyped_storage().data_ptr() for group in engine.rank_model.groups for x in (group.data,)}
    pack, close = cheap_recompute._RecordedForward._pack_saved, cheap_recompute.RecomputedResults.keep_sources

    def keep(x: object) -> None:
        for y in cheap_recompute._tensors_in(x):
            if y.untyped_storage().data_ptr() not in parameters:
                held[y.untyped_storage().data_ptr()] = y

    def packed(self: Any, x: Tensor) -> Any:
        saved = pack(self, x)
        keep(saved)
        return saved

    def closed(self: Any, values: Any, references: Any) -> None:
        close(self, values, references)
        for value in self.kept.values():
            keep(value)

    monkeypatch.setattr(cheap_recompute._RecordedForward, "_pack_saved", packed)
    monkeypatch.setattr(cheap_recompute.RecomputedResults, "keep_sources", closed)
    engine.forward_backward(batch)
    return sum(x.untyped_storage().nbytes() for x in held.values())


def test_a_layer_keeps_what_products_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Llama layer x, q, k, v, attention, its projection, gate and up: 4 + 2k + 2i residual streams, and attention's logarithms."""
    kept = _kept_bytes(_engine(LLAMA, "data=1 recompute=cheap"), resolve(LLAMA).batch(ROWS), monkeypatch)
    stream = 4 * ROWS * LENGTH * HIDDEN
    streams = 4 + 2 * KV_HEADS / HEADS + 2 * INNER / HIDDEN
    logarithms, rotary = 4 * ROWS * LENGTH * HEADS, 2 * 4 * LENGTH * HIDDEN // HEADS  # rotary tables enter all layers
    assert LAYERS * streams * stream <= kept <= LAYERS * (streams * stream + logarithms) + rotary


def test_a_result_that_is_made_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: dropout that runs again draws other numbers."""
    layout = "data=1 recompute=cheap"
    right, compute, calls = _train(DROPPING, layout)[1], random_stream._compute_dropout, [0]

    def drawn(x: Tensor, draw: Any, in_place: bool = False) -> Tensor:
        calls[0] += 1
        return compute(x, draw, in_place) * (1 + (calls[0] > 5))

    monkeypatch.setattr(random_stream, "_compute_dropout", drawn)
    wrong = _train(DROPPING, layout)[1]
    assert not all(torch.equal(right[name], wrong[name]) for name in right)


def test_what_does_not_go_with_it_is_refused_by_name() -> None:
    for words, said in (
        ("offload=activations recompute=cheap", "recompute=cheap with offload=activations is not supported"),
        ("recompute=cheap segment=2", "segment=2 recomputes layers together, and recompute=cheap recomputes no whole ones"),
        ("recompute=cheap compile=on", "recompute=cheap with compile=on is not supported"),
    ):
        with pytest.raises(LayoutError, match=said):
            Layout.parse(f"data=1 {words}")


def test_the_planner_takes_it_where_that_fits_and_says_what_it_is_worth() -> None:
    """Between what keeping all takes and what cheap layers take, recomputing cheap operators is the fastest that fits."""
    words = "ranks=1 microbatches=1 precision=float32 offload=none threads=1"

    def predict(recompute: str) -> Any:
        return shardwise.plan(LLAMA, 64, cluster="1xcpu-2", layout=f"data=1 recompute={recompute} threads=1").prediction

    none, cheap = predict("none"), predict("cheap")
    limit = 1.06 * (0.5 * (none.memory.total + cheap.memory.total) - cheap.memory.margin)
    plan = shardwise.plan(LLAMA, 64, cluster="1xcpu-2", constraints=words, device_memory=limit)
    assert plan.layout.residency.recompute.kind == "cheap"
    assert "in their cheap operators, which frees" in dict(plan.reasons)["layers"]
    assert none.step_time_s < cheap.step_time_s < predict("full").step_time_s
