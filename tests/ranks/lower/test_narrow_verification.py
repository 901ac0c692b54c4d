"""In 16 bits a run is compared with the serial run in the same precision, and what may lie between them is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardwise
from shardwise.plan.layout import Layout
from shardwise.run.verify.verify import Verification
from shardwise.zoo.resolve import resolve


def verified(layout: str, model: str = "gpt-tiny", samples: int = 4, **options: Any) -> Verification:
    found = resolve(model)
    return shardwise.verify(found.make, layout, found.batch(samples), loss=found.loss, cut_everything=True, **options)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["data=2 zero=2", "tensor=2", "pipeline=2 microbatches=2 schedule=zb-h1"])
def test_a_layout_in_16_bits_is_as_near_as_serial_runs_are_to_one_another(precision: str, layout: str) -> None:
    found = verified(f"{layout} precision={precision}")
    assert found.ok, found
    assert (found.dtype, found.in_noise, found.tolerance) == (precision, True, 4.0)
    assert 0 < found.worst["gradients"] < 4
    assert "times the rounding noise; tolerance 4" in str(found)


def test_one_rank_is_the_serial_run_bit_for_bit() -> None:
    """bfloat16 is torch's autocast over float32 weights, gradients and sums, and float16 its GradScaler's besides."""
    for precision in ("bfloat16", "float16"):
        assert set(verified(f"data=1 precision={precision}").worst.values()) == {0.0}


def test_a_float32_run_is_not_taken_for_one_in_16_bits() -> None:
    """The broken twin: what the run computes is not what the layout says."""
    found = resolve("gpt-tiny")
    assert not shardwise.verify(found.make, "data=2 precision=bfloat16", found.batch(4), loss=found.loss, tolerance=1e-5, steps=1).ok


@pytest.mark.parametrize(("precision", "factor"), [("bfloat16", 1.2), ("float16", 1.02)])
def test_broken_twin_a_gradient_that_is_somewhat_too_large(subject: Callable[[str], Any], precision: str, factor: float) -> None:
    layout = Layout.parse(f"data=2 precision={precision}")
    found = subject("gpt-tiny").check(layout, sabotage={"layers.1.mlp.up.weight": factor}, steps=1)
    assert "gradients of layers.1.mlp.up.weight in step 1" in str(found.first_difference)
    assert "times the rounding noise" in str(found.first_difference)


def test_what_a_layout_says_is_what_is_verified() -> None:
    assert verified("data=2 precision=float32", steps=1).dtype == "float32"
    assert verified("data=2", steps=1).dtype == "float64"
    assert verified("data=2 precision=float16", steps=1, dtype="float64").dtype == "float64"
