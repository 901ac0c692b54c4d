"""Recomputation of some layers, run: equal to the serial model, the layers that were asked for, and memory between all and none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import RankError
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.residency.recompute import RecomputedModule
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.traced import of
from tests.support.verified_models import Subject


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "tensor=2 microbatches=2 recompute=full:1"),
        ("gpt-tiny", "pipeline=2 microbatches=4 recompute=full:1/0 schedule=zb-h1"),
        ("t5-tiny", "data=2 pipeline=2 microbatches=2 zero=3 recompute=full:0/1"),
        ("resnet-tiny", "data=2 microbatches=2 recompute=full:2"),
        ("llama-tiny", "pipeline=2 microbatches=3 recompute=full:layers.1 schedule=gpipe"),
    ],
)
def test_some_layers_recomputed_equal_serial(name: str, layout: str) -> None:
    if "layers.1" in layout:
        layout = layout.replace("layers.1", _layers(of(name))[-1])
    found = of(name).check(replace(Layout.parse(layout), precision="float64"))
    assert found.ok, found


def _layers(subject: Subject) -> list[str]:
    from shardwise.lower.local import layer_of

    graph = subject.source.capture(subject.batch, subject.loss, subject.size).graph
    return [name for name in dict.fromkeys(layer_of(op.site) for op in graph.operators) if name]


def _run(world: World, word: str) -> tuple[int, float]:
    """Of one word, on this rank: layers that run again, and the most bytes that it held."""
    subject = of("gpt-tiny")
    plan = subject.plan(Layout.parse(f"recompute={word}"))
    engine = Engine(plan, subject.source, subject.batch, subject.loss, world, seed=0)
    engine.forward_backward(subject.batch)
    modules = [m for runner in engine.executor.runners.values() for m in runner.local.module.modules()]
    peak = engine.peak_memory()
    return sum(isinstance(m, RecomputedModule) for m in modules), 0.0 if peak is None else peak.total


def test_as_many_layers_run_again_as_are_asked_for_and_no_more_is_kept() -> None:
    layers = _layers(of("gpt-tiny"))
    words = ["none", "full:1", f"full:{layers[0]}", f"full:{'+'.join(layers)}", "full"]
    rows = [launch(lambda world, word=word: _run(world, word), 1, timeout_s=60, show=False)[0] for word in words]
    assert [count for count, _ in rows] == [0, 1, 1, len(layers), len(layers)]
    none, one, named, every, full = (kept for _, kept in rows)
    assert none > one > full
    assert named == one
    assert every == full


def test_a_layer_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"recompute=full:h\.77: the model has no such layer"):
        launch(lambda world: _run(world, "full:h.77"), 1, timeout_s=60, show=False)
