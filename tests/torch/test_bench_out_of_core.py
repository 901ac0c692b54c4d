"""The benchmark of training under a limit: what it searches, what it computes, that each way is a layout, and one try of each outcome."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.out_of_core import OWN, SWAPS, Size, Tried, Tries, largest, shape_of_gems, ways  # noqa: E402

from weft.plan.layout import Layout  # noqa: E402

SMALL = Size("resnet-tiny:base=8", 64, 4)


def test_the_largest_is_the_last_before_one_that_does_not_fit() -> None:
    sizes = [Size("m", n, 1) for n in (1, 2, 3, 4)]
    assert largest(sizes, lambda size: Tried(why="" if size.image < 3 else "too much")) == sizes[1]
    assert largest(sizes, lambda size: Tried(why="" if size.image != 2 else "too much")) == sizes[0]
    assert largest(sizes, lambda size: Tried(why="too much")) is None


def test_the_shape_of_gems_is_its_closed_form() -> None:
    """MP-Basic takes n·D·(tf + tb); GEMS D·(tf + tb) + (n - 1)·(D·tb + tf), here with tf = 1 and tb = 2."""
    for d, n, ratio in shape_of_gems((2, 4, 6), (2, 4)):
        assert ratio == pytest.approx(n * d * 3 / (d * 3 + (n - 1) * (2 * d + 1)))


def test_every_way_is_a_layout_of_two_ranks() -> None:
    assert [way.name for way in ways(4)][-2:] == [SWAPS, OWN]
    for way in ways(4)[:-2]:
        layout = Layout.parse(way.layout)
        layout.check_runs()
        assert layout.num_ranks == 2


def test_ways_run_or_say_why_not() -> None:
    roomy = Tries(64e6, "1xcpu-2")
    by_name = {way.name: way for way in ways(2)}
    found = {name: roomy.run(SMALL, by_name[name], 1) for name in ("GEMS MASTER", SWAPS)}
    for tried in found.values():
        assert not tried.why
        assert 0 < tried.held_bytes < 64e6
    assert found["GEMS MASTER"].losses == pytest.approx(found[SWAPS].losses, rel=0.2)  # batch norm over other samples
    tight = Tries(1e6, "1xcpu-2").run(SMALL, by_name["MP-Basic"], 1)
    assert "MiB" in tight.why or "KiB" in tight.why
    assert not tight.seconds
