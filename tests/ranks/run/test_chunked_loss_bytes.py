"""Counted bytes of a loss in chunks: one chunk's logits in place of all, as priced, by axis, precision and schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardwise
from shardwise.plan.plan_file import format_plan
from shardwise.zoo.resolve import resolve
from tests.support.counted_bytes import count_bytes

GPT = "gpt:layers=2,hidden=64,heads=4,sequence=64,vocabulary=2048"
LAYOUTS = [
    *(f"data=2 loss_chunks={count}" for count in (1, 2, 3, 8)),
    "tensor=2 loss_chunks=4",
    *(f"data=2 precision={name} loss_chunks={count}" for name in ("bfloat16", "bfloat16-mixed", "float64") for count in (1, 4)),
    *(f"pipeline=2 microbatches=4 loss_chunks={count}" for count in (1, 4)),
    "data=2 zero=3 recompute=full precision=bfloat16-mixed loss_chunks=4",
]


def test_priced_bytes_are_the_counted_ones(ranks: Callable[..., Any]) -> None:
    model = resolve(GPT)
    plans = [shardwise.plan(model.make, model.batch(16), loss=model.loss, cluster="1xcpu-2", layout=layout) for layout in LAYOUTS]
    counts = ranks(count_bytes, 2, GPT, 16, [format_plan(plan) for plan in plans])[0]
    for layout, plan, counted in zip(LAYOUTS, plans, counts, strict=True):
        assert plan.prediction is not None
        priced = plan.prediction.memory
        assert priced.total - priced.margin == pytest.approx(counted["total"], rel=0.08), layout
    totals = {layout: counted["total"] for layout, counted in zip(LAYOUTS, counts, strict=True)}
    logits = 8 * 64 * 2048 * 4  # of a replica, in float32
    assert totals["data=2 loss_chunks=1"] - totals["data=2 loss_chunks=8"] > 1.5 * logits
    assert totals["data=2 loss_chunks=8"] < totals["data=2 loss_chunks=3"] < totals["data=2 loss_chunks=2"]
