"""Priced bytes beside counted ones in every precision: by ZeRO stage, axis and dtype of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardwise
from shardwise.plan.plan_file import format_plan
from shardwise.zoo.resolve import resolve
from tests.support.counted_bytes import count_bytes

GPT = "gpt:layers=2,hidden=128,heads=4,sequence=64,vocabulary=256"
MIXED = "precision=bfloat16-mixed"
LLAMA = "llama:vocabulary=200,sequence=64,hidden=128,layers=3,heads=4,kv_heads=2,inner=448"
CHEAP = ["data=1 microbatches=2 recompute=cheap", "data=1 microbatches=2 recompute=cheap precision=bfloat16"]
LAYOUTS = [
    *(f"data=2 zero={zero} precision={name}" for zero in (0, 1, 2, 3) for name in ("bfloat16", "bfloat16-mixed")),
    f"data=2 zero=1 gradients=bfloat16 {MIXED}",
    f"data=2 zero=3 gradients=bfloat16 {MIXED}",
    f"data=2 zero=1 offload=optimizer {MIXED}",
    "data=2 zero=1 precision=float64",
    *(f"data=2 microbatches=2 zero={zero} scatter={word} {MIXED}" for zero in (2, 3) for word in ("each", "last")),
    *(f"{axis} {MIXED}" for axis in ("tensor=2", "pipeline=2 microbatches=4", "context=2", "data=2 zero=1 recompute=full")),
    "pipeline=2 microbatches=4 precision=bfloat16",  # casts of every microbatch that waits for its backward
]


def test_priced_bytes_are_the_counted_ones_in_every_precision(ranks: Callable[..., Any]) -> None:
    model = resolve(GPT)
    plans = [shardwise.plan(model.make, model.batch(8), loss=model.loss, cluster="1xcpu-2", layout=layout) for layout in LAYOUTS]
    counts = ranks(count_bytes, 2, GPT, 8, [format_plan(plan) for plan in plans])[0]
    for layout, plan, counted in zip(LAYOUTS, plans, counts, strict=True):
        assert plan.prediction is not None
        priced = plan.prediction.memory
        for part in ("parameters", "optimizer"):
            assert getattr(priced, part) == pytest.approx(counted[part], rel=1e-3, abs=64), (layout, part)
        assert priced.total - priced.margin == pytest.approx(counted["total"], rel=0.08), layout
    (autocast,) = (plan for layout, plan in zip(LAYOUTS, plans, strict=True) if layout == "data=2 zero=1 precision=bfloat16")
    counted = counts[LAYOUTS.index(f"data=2 zero=1 {MIXED}")]
    assert autocast.prediction is not None
    assert autocast.prediction.memory.parameters != pytest.approx(counted["parameters"], rel=0.5)  # the broken twin: another precision


def test_priced_activations_are_those_counted_where_cheap_operators_run_again(ranks: Callable[..., Any]) -> None:
    plans = [shardwise.plan(LLAMA, 4, cluster="1xcpu-2", layout=layout) for layout in CHEAP]
    for plan, counted in zip(plans, ranks(count_bytes, 1, LLAMA, 4, [format_plan(plan) for plan in plans], 2, "sgd")[0], strict=True):
        assert plan.prediction is not None
        assert plan.prediction.memory.activations == pytest.approx(counted["activations"], rel=0.1)
    whole = shardwise.plan(LLAMA, 4, cluster="1xcpu-2", layout="data=1 microbatches=2").prediction
    assert whole is not None
    assert whole.memory.activations > 1.5 * counted["activations"]  # the broken twin: nothing runs again
