"""Figures of schedules, in shares of what one rank has, and the colours of their pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from weft.errors import UsageError
from weft.plan.program import Op
from weft.report.gantt import gantt, svg
from weft.report.paint import PAINT, shades
from weft.schedules import build
from weft.simulate.summary import Times, summarize


def test_times_are_read_and_split() -> None:
    whole, split = Times.parse("f=1,b=3,c=0.5"), Times.parse("f=1 b=2 w=4")
    assert [whole.of(op) for op in Op] == [1, 3, 1.5, 1.5, 1]
    assert [split.of(op) for op in Op] == [1, 6, 2, 4, 1]
    assert whole.transfer == 0.5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("f=1", r"lacks b \(a backward\)"),
        ("", "lacks f .* and b"),
        ("f=1,b=2,f=3", r"gives f \(a forward\) twice"),
        ("f=1,b=x", "'x' is not a number"),
        ("f=1,b=-2", r"0 or from 1e-30 to 1e\+30"),
        ("f=1,b=nan", r"0 or from 1e-30 to 1e\+30"),
        ("f=0,b=0", "nothing takes any time"),
        ("f=1,b=2,q=3", "'q=3' is not f=, b=, w= or c="),
    ],
)
def test_times_that_cannot_be_are_named(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Times.parse(text)


def test_two_stages_a_rank_count_half_each() -> None:
    """Interleaved: (p-1)/(v·m) of the compute more; the first rank holds (vp + p - 1)/v."""
    found = summarize(build("interleaved", 8, 8, chunks=2), Times(1, 2), chunks=2)
    assert found.time == 24 * (1 + 3 / 16)
    assert found.peak_in_flight == (5.5, 4.5, 3.5, 2.5)
    assert found.weights_held == (1, 1, 1, 1)
    v = summarize(build("zb-v", 8, 8), Times(1, 1, 1), chunks=2)
    assert (v.time, v.bubble, v.peak_in_flight) == (24 + 1.5, 0, (4, 4, 4, 4))


def test_replicas_hold_two_stages_and_their_exchange_takes_nothing() -> None:
    found = summarize(build("gems-master", 3, 4), Times(1, 2, transfer=0.5))
    assert found.weights_held == (2, 1, 2)
    assert found.peak_in_flight == (1, 1, 1)
    # Two transfers down, then two up for each microbatch; those down of the later ones go beside the backward of the one before.
    assert found.time == 3 * 3 + 3 * 7 + 0.5 * 2 * (1 + 4)


def test_replicas_are_told_apart_by_their_shade_and_a_stroke() -> None:
    timeline = summarize(build("chimera", 4, 4), Times(1, 2)).timeline
    look = shades(timeline)
    assert look.replica == {0: 0, 1: 1, 2: 0, 3: 1}
    assert (look.meaning, look.shows_stage) == ("lighter: replica 2", False)
    assert "|F0==F2==....F1--B1------F3--B3------" in gantt(timeline, 64)
    fills = {r.get("fill") for r in ElementTree.fromstring(svg(timeline)).iter("{http://www.w3.org/2000/svg}rect")}
    assert {fill for kind in "FB" for fill, _ in PAINT[kind]} <= fills


def test_stages_of_a_rank_are_told_apart_too() -> None:
    look = shades(summarize(build("zb-v", 8, 8), Times(1, 1, 1), 2).timeline)
    assert (look.meaning, look.shows_stage) == ("lighter: every second stage of a rank", True)
    assert shades(summarize(build("1f1b", 4, 8), Times(1, 2)).timeline).meaning == ""


def test_what_each_rank_holds_stands_beside_its_row() -> None:
    found = summarize(build("1f1b", 2, 2), Times(1, 2))
    beside = [("in flight", [f"{n:g}" for n in found.peak_in_flight])]
    text = gantt(found.timeline, 18, beside, "mine", "{:g}".format).splitlines()
    assert text[0] == "mine"
    assert text[1].endswith("| busy 66.7 %, in flight 2")
    assert text[-1].endswith(" 9")
    assert ">in flight</text>" in svg(found.timeline, beside=beside, headline="<mine>")
    assert "&lt;mine&gt;" in svg(found.timeline, beside=beside, headline="<mine>")
