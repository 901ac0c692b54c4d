"""Figures of schedules, in shares of what one rank has, and the colours of their pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from shardwise.errors import UsageError
from shardwise.plan.ir.program import ComputeOp
from shardwise.report.gantt import COLOURS_BY_KIND, gantt_svg, gantt_text, span_shades
from shardwise.schedules import build
from shardwise.simulate.summary import MicrobatchTimes, summarize_schedule


def test_times_are_read_and_split() -> None:
    whole, split = MicrobatchTimes.parse("f=1,b=3,c=0.5"), MicrobatchTimes.parse("f=1 b=2 w=4")
    assert [whole.time_of(op) for op in ComputeOp] == [1, 3, 1.5, 1.5, 1]
    assert [split.time_of(op) for op in ComputeOp] == [1, 6, 2, 4, 1]
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
        MicrobatchTimes.parse(text)


def test_two_stages_a_rank_count_half_each() -> None:
    """Interleaved: (p-1)/(v·m) of the compute more; the first rank holds (vp + p - 1)/v."""
    found = summarize_schedule(build("interleaved", 8, 8, chunks=2), MicrobatchTimes(1, 2), chunks=2)
    assert found.time == 24 * (1 + 3 / 16)
    assert found.peak_in_flight == (5.5, 4.5, 3.5, 2.5)
    assert found.weights_held == (1, 1, 1, 1)
    v = summarize_schedule(build("zb-v", 8, 8), MicrobatchTimes(1, 1, 1), chunks=2)
    assert (v.time, v.bubble_in_window, v.peak_in_flight) == (24 + 1.5, 0, (4, 4, 4, 4))


def test_replicas_hold_two_stages_and_their_exchange_takes_nothing() -> None:
    found = summarize_schedule(build("gems-master", 3, 4), MicrobatchTimes(1, 2, transfer=0.5))
    assert found.weights_held == (2, 1, 2)
    assert found.peak_in_flight == (1, 1, 1)
    # Two transfers down, then two up for each microbatch; those down of the later ones go beside the backward of the one before.
    assert found.time == 3 * 3 + 3 * 7 + 0.5 * 2 * (1 + 4)


def test_replicas_are_told_apart_by_their_shade_and_a_stroke() -> None:
    timeline = summarize_schedule(build("chimera", 4, 4), MicrobatchTimes(1, 2)).timeline
    look = span_shades(timeline)
    assert look.replica == {0: 0, 1: 1, 2: 0, 3: 1}
    assert (look.meaning, look.shows_stage) == ("lighter: replica 2", False)
    assert "|F0==F2==....F1--B1------F3--B3------" in gantt_text(timeline, 64).plain
    fills = {r.get("fill") for r in ElementTree.fromstring(gantt_svg(timeline)).iter("{http://www.w3.org/2000/svg}rect")}
    assert {fill for kind in "FB" for fill, _ in COLOURS_BY_KIND[kind]} <= fills


def test_stages_of_a_rank_are_told_apart_too() -> None:
    look = span_shades(summarize_schedule(build("zb-v", 8, 8), MicrobatchTimes(1, 1, 1), 2).timeline)
    assert (look.meaning, look.shows_stage) == ("lighter: every second stage of a rank", True)
    assert span_shades(summarize_schedule(build("1f1b", 4, 8), MicrobatchTimes(1, 2)).timeline).meaning == ""


def test_what_each_rank_holds_stands_beside_its_row() -> None:
    found = summarize_schedule(build("1f1b", 2, 2), MicrobatchTimes(1, 2))
    beside = [("in flight", [f"{n:g}" for n in found.peak_in_flight])]
    text = gantt_text(found.timeline, 18, beside, "mine", "{:g}".format).plain.splitlines()
    assert text[0] == "mine"
    assert text[1].endswith("| busy 66.7 %, in flight 2")
    assert text[-1].endswith(" 9")
    assert ">in flight</text>" in gantt_svg(found.timeline, rank_columns=beside, headline="<mine>")
    assert "&lt;mine&gt;" in gantt_svg(found.timeline, rank_columns=beside, headline="<mine>")
