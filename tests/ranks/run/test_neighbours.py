"""`neighbours=pipeline`: stages of a replica side by side, its replicas apart; equal to the serial model whatever else a layout has."""

from __future__ import annotations

import pytest

import shardwise
from shardwise.errors import LayoutError
from shardwise.plan.layout import Layout
from shardwise.zoo.resolve import resolve


@pytest.mark.parametrize(
    ("name", "batch", "layout"),
    [
        ("gpt-tiny", 8, "data=2 tensor=2 pipeline=2 microbatches=4 schedule=zb-h1 zero=2"),
        ("gpt-tiny", 8, "data=2 pipeline=2 chunks=2 schedule=interleaved microbatches=4 zero=3 recompute=full"),
        ("gpt-tiny", 8, "data=2 context=2 pipeline=2 microbatches=2"),
        ("resnet-tiny", 16, "data=2 pipeline=2 microbatches=4 schedule=gems-master batch_norm=local"),
        ("moe-tiny:capacity=2", 8, "data=2 expert=2 pipeline=2 microbatches=2"),
    ],
)
def test_stages_that_are_neighbours_equal_serial(name: str, batch: int, layout: str) -> None:
    model = resolve(name)
    found = shardwise.verify(model.make, f"{layout} neighbours=pipeline", model.batch(batch), loss=model.loss)
    assert found.ok, found.first_difference
    assert found.tolerance == 1e-9


def test_ranks_lie_as_the_layout_says() -> None:
    layout = Layout.parse("data=4 tensor=2 pipeline=2 microbatches=2 neighbours=pipeline")
    assert layout.mesh.group(0, "tensor") == (0, 1)
    assert layout.mesh.group(0, "pipeline") == (0, 2)
    assert layout.mesh.group(0, "data") == (0, 4, 8, 12)
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse("data=4 neighbours=pipeline")) == "data=4 tensor=1 pipeline=1"  # without a pipeline it says nothing
    with pytest.raises(LayoutError, match="neighbours=pipeline with stages that are arranged differently"):
        Layout.parse("pipeline=2 inner=2x1/1x2 microbatches=2 neighbours=pipeline")
