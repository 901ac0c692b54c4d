"""Stages with unlike numbers of ranks: equal to the serial model, checkpoints in any other layout, elements that cross once, and twins."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from test_inner_layouts import _counted

from shardwise.errors import Infeasible
from shardwise.plan.layout import Layout
from shardwise.run.engine import Engine
from shardwise.run.rank_model import build
from shardwise.run.step.stage_resharding import StageResharding
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.traced import of, weights_after

TIED = "gpt-tiny:tied=true"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt-tiny", "pipeline=2 inner=2x1/1x1 microbatches=2"),
        (TIED, "pipeline=2 inner=1x1/2x1 microbatches=4 schedule=zb-h1 zero=1"),
        (TIED, "pipeline=2 inner=1x1/1x2 microbatches=4 zero=1 recompute=full"),
        ("gpt-tiny", "pipeline=2 inner=1x2/1x1 microbatches=2 schedule=gpipe"),
        ("gpt-tiny", "pipeline=2 inner=2x1/1x1 microbatches=4 zero=3 recompute=full:1"),
        ("llama-tiny", "pipeline=2 inner=2x2/1x2 microbatches=2 sequence_parallel=on"),
        ("unet-tiny", "pipeline=3 inner=2x1/1x1/2x1 microbatches=2 schedule=zb-h2"),
        ("unet-tiny", "pipeline=2 inner=1x1/1x2 spatial=2 microbatches=2 zero=2"),
        ("t5-tiny", "pipeline=4 inner=2x1/2x1/1x1/1x1 microbatches=4"),
        ("resnet-tiny", "pipeline=2 inner=1x1/2x1 microbatches=2 offload=all"),
        ("moe-tiny", "pipeline=2 inner=1x2/1x1 microbatches=2"),
        ("gpt-tiny", "pipeline=2 inner=3x1/2x1 microbatches=2 zero=2"),
    ],
)
def test_stages_of_unlike_numbers_of_ranks_equal_serial(name: str, layout: str) -> None:
    found = of(name).check(replace(Layout.parse(layout), precision="float64"), optimizer={"name": "adamw", "clip": 0.05})
    assert found.ok, found
    assert found.tolerance == 1e-9


@pytest.mark.parametrize("layout", ["pipeline=2 inner=2x1/1x1 microbatches=2", "pipeline=2 inner=1x2/1x1 microbatches=2"])
def test_each_element_crosses_once(layout: str) -> None:
    of("gpt-tiny")
    rows = launch(lambda world: _counted(world, "gpt-tiny", layout), 3, timeout_s=60, show=False)
    assert sum(sent for sent, _ in rows) == rows[0][1] > 0


def test_checkpoints_load_between_unlike_stages_and_other_layouts(tmp_path: Path) -> None:
    """What a layout saves behind its first step the next one trains on from, to the weights of three steps of one rank."""
    subject = of(TIED)
    layouts = ["data=2", "pipeline=2 inner=2x1/1x1 microbatches=2 zero=1", "pipeline=2 inner=1x1/1x2 microbatches=2", "data=1"]

    def weights(text: str, steps: int, folder: Path, loads: bool) -> dict[str, list[float]]:
        layout = Layout.parse(f"{text} precision=float64")

        def on_rank(world: World) -> dict[str, list[float]]:
            engine = Engine(subject.plan(layout), subject.source, subject.batch, subject.loss, world, seed=0)
            return weights_after(steps, engine, subject.batch, folder, loads)

        found: dict[str, list[float]] = launch(on_rank, layout.num_ranks, timeout_s=60, show=False)[0]
        return found

    want = weights("data=1", 3, tmp_path / "serial", loads=False)
    for number, (first, then) in enumerate(pairwise(layouts)):
        weights(first, 1, tmp_path / str(number), loads=False)
        found = weights(then, 2, tmp_path / str(number), loads=True)
        assert found.keys() == want.keys()
        for name, values in want.items():
            assert found[name] == pytest.approx(values, abs=1e-9), (first, then, name)


def test_a_batch_with_fewer_samples_than_the_widest_stage_has_replicas_is_refused() -> None:
    with pytest.raises(Infeasible, match="has 0 for each of data=3"):
        of("gpt-tiny", 2).check(Layout.parse("pipeline=2 inner=1x1/3x1 precision=float64"))


def test_a_shared_gradient_that_only_one_stage_sums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: tied embeddings of stages of two ranks and one count as if all three had the same."""
    monkeypatch.setattr(build, "gradient_shares", lambda between, sharding, mesh: dict.fromkeys(between, 1 / 3))
    found = of(TIED).check(Layout.parse("pipeline=2 inner=2x1/1x1 microbatches=2 precision=float64"))
    assert not found.ok
    assert found.worst["gradients"] > 1e-3


def test_a_whole_gradient_that_each_of_two_ranks_takes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin: what comes back from one rank counts on both tensor ranks whose gradients are summed."""
    monkeypatch.setattr(StageResharding, "_gradient_share", lambda self, value, name: 1.0)
    found = of("gpt-tiny").check(Layout.parse("pipeline=2 inner=1x2/1x1 microbatches=2 precision=float64"))
    assert not found.ok
    assert found.worst["gradients"] > 1e-3
