"""Layers repeated several at a time, run: equal to the serial model in float64, so many units, and less kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.residency.recompute import RecomputedModule
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.traced import of

GPT = "gpt:layers=5,hidden=16,heads=2,sequence=8,vocabulary=32"
DROPPING = f"{GPT},dropout=0.2"
MODELS = Path(__file__).parents[2].joinpath("support", "segment_models.py")
WRITING, THIN = f"{MODELS}:writing", f"{MODELS}:thin"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (DROPPING, "data=2 zero=2 recompute=full segment=2"),
        (DROPPING, "tensor=2 recompute=full segment=3"),
        (DROPPING, "pipeline=2 microbatches=4 recompute=full:3/1 segment=2 schedule=zb-h1"),
        (GPT, "data=2 recompute=full:layers.0-1+layers.3-4 segment=3 offload=optimizer"),
        ("resnet-tiny", "data=2 microbatches=2 recompute=full segment=3"),
        ("unet-tiny", "recompute=full segment=2"),
        (WRITING, "data=2 recompute=full segment=3"),
    ],
)
def test_segments_equal_serial(name: str, layout: str) -> None:
    found = of(name).check(replace(Layout.parse(layout), precision="float64"))
    assert found.ok, found


def _run(world: World, name: str, words: str) -> tuple[list[int], float]:
    """On this rank: operators of each unit that runs again, and the most bytes of activations."""
    subject = of(name)
    engine = Engine(subject.plan(Layout.parse(words)), subject.source, subject.batch, subject.loss, world, seed=0)
    engine.forward_backward(subject.batch)
    modules = [m for runner in engine.executor.runners.values() for m in runner.local.module.modules()]
    peak = engine.peak_memory()
    assert peak is not None
    return [len(list(m.inner.graph.nodes)) for m in modules if isinstance(m, RecomputedModule)], peak.activations


def _units(name: str, words: str) -> tuple[list[int], float]:
    return launch(lambda world: _run(world, name, words), 1, timeout_s=60, show=False)[0]


def test_as_many_units_as_segments() -> None:
    rows = [_units(THIN, f"recompute=full segment={k}") for k in (1, 5, 12)]
    assert [len(units) for units, _ in rows] == [12, 3, 1]
    one, five, every = (kept for _, kept in rows)
    assert five < one < every


def test_a_layer_that_reads_what_is_written_ends_a_segment() -> None:
    """Of five layers the third is kept: segments of three are its two neighbours before and behind."""
    units, _ = _units(WRITING, "recompute=full segment=3")
    assert len(units) == 2
