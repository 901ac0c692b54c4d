"""Timelines: sums by hand, both JSON forms, comparison, and their pictures."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UsageError
from shardwise.plan.ir.program import ComputeOp, Program
from shardwise.plan.ir.timeline import Span, Timeline, compare
from shardwise.report.gantt import gantt_svg, gantt_text
from shardwise.schedules import build
from shardwise.simulate.clock import simulate

TWO = Timeline(
    "two",
    2,
    (
        Span(0, "compute", "0F0", 1.0, 3.0, "F"),
        Span(0, "compute", "0F1", 2.0, 4.0, "F"),
        Span(0, "send", "x(0,1,0)>1", 3.0, 5.0, "send"),
        Span(1, "compute", "1F0", 5.0, 6.0, "F"),
    ),
)


def test_totals_by_hand() -> None:
    assert (TWO.start_s, TWO.end_s, TWO.total_s) == (1.0, 6.0, 5.0)
    assert TWO.busy_s(0) == 3.0, "two spans that overlap count once"
    assert (TWO.busy(1), TWO.busy(0, "send")) == (0.2, 0.4)
    assert TWO.bubble == pytest.approx(1 - (3 + 1) / 10)
    assert TWO.lanes == (("compute", "send"), ("compute",))


def test_an_empty_timeline_has_no_time() -> None:
    empty = Timeline("empty", 2, ())
    assert (empty.total_s, empty.bubble, empty.busy(0)) == (0.0, 0.0, 0.0)
    assert gantt_text(empty).plain
    assert gantt_svg(empty)


@pytest.mark.parametrize(
    "span", [Span(2, "compute", "a", 0, 1, "F"), Span(0, "compute", "a", 2, 1, "F"), Span(0, "compute", "a", math.nan, 1, "F")]
)
def test_a_span_that_cannot_be_is_refused(span: Span) -> None:
    with pytest.raises(UsageError, match="timeline bad: span a"):
        Timeline("bad", 2, (span,))


times = st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)).map(sorted)
spans = st.builds(
    lambda rank, lane, name, t, kind: Span(rank, lane, name, t[0], t[1], kind), st.integers(0, 3), st.text(), st.text(), times, st.text()
)


@given(st.text(), st.lists(spans))
def test_json_round_trip(name: str, some: list[Span]) -> None:
    timeline = Timeline(name, 4, tuple(some))
    assert Timeline.from_json(timeline.to_json()) == timeline


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON: line 1"),
        ("[" * 100_000, "cannot be read"),
        ("9" * 5000, "cannot be read"),
        ("[]", "not a timeline"),
        ('{"kind": "shardwise plan"}', "not a timeline"),
        ('{"kind": "shardwise timeline", "format_version": 2}', "format version 2; this shardwise reads version 1"),
        ('{"kind": "shardwise timeline", "format_version": 1, "name": "a", "num_ranks": 1}', "cannot be read"),
        ('{"kind": "shardwise timeline", "format_version": 1, "name": "a", "num_ranks": 1, "spans": [[1, 2]]}', "cannot be read"),
        ('{"kind": "shardwise timeline", "format_version": 1, "name": "a", "num_ranks": 1, "spans": 3}', "cannot be read"),
    ],
)
def test_json_that_is_no_timeline_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Timeline.from_json(text)


def test_perfetto_trace_events() -> None:
    """The Trace Event Format: complete events "X" with microseconds, metadata events "M" that name processes and threads."""
    events = json.loads(TWO.to_perfetto())["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        ("0F0", 0, 0, 0.0, 2e6),
        ("0F1", 0, 0, 1e6, 2e6),
        ("x(0,1,0)>1", 0, 1, 2e6, 2e6),
        ("1F0", 1, 0, 4e6, 1e6),
    ]
    named = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]}
    assert named == {
        ("process_name", 0, None): "rank 0",
        ("thread_name", 0, 0): "compute",
        ("thread_name", 0, 1): "send",
        ("process_name", 1, None): "rank 1",
        ("thread_name", 1, 0): "compute",
    }


def per_op(scale: float):  # type: ignore[no-untyped-def]
    return lambda action: scale * (1.0 if action.op is ComputeOp.F else 2.0)


def test_compare_kind_by_kind() -> None:
    a = simulate(build("gpipe", 2, 3), per_op(1.0), lambda *_: 0.5)
    b = simulate(build("gpipe", 2, 3), per_op(1.1), lambda *_: 1.0)
    found = {d.kind: d for d in compare(a, b)}
    assert list(found) == ["F", "send", "recv", "B"]
    assert (found["F"].count_a, found["F"].count_b, found["F"].seconds_a) == (6, 6, 6.0)
    assert found["B"].ratio == pytest.approx(1.1)
    assert found["send"].ratio == pytest.approx(2.0)
    assert math.isnan(compare(a, Timeline("none", 2, ()))[0].ratio)


def test_text_picture_by_hand() -> None:
    timeline = simulate(build("1f1b", 2, 3), per_op(1.0), lambda *_: 0.0)
    assert gantt_text(timeline, width=40).plain.splitlines() == [
        "1f1b: 12.0 s, 2 ranks, idle 25.0 % of the time",
        "rank 0 |F0=F1=......B0====F2=B1====...B2====| busy 75.0 %",
        "rank 1 |...F0=B0====F1=B1====F2=B2====......| busy 75.0 %",
        "        0                             12.0 s",
    ]


@pytest.mark.parametrize("width", [1, 3, 10, 37, 100])
def test_text_rows_have_one_length_at_any_width(width: int) -> None:
    timeline = simulate(build("1f1b", 3, 7), lambda a: 0.01 + 0.003 * a.stage + 0.001 * a.microbatch, lambda *_: 0.001)
    rows = [row.partition("|")[2].partition("|")[0] for row in gantt_text(timeline, width).plain.splitlines()[1:4]]
    assert {len(row) for row in rows} == {width}


def test_svg_has_a_bar_for_every_compute_and_escapes_names() -> None:
    picture = gantt_svg(simulate(build("gpipe", 3, 4), per_op(1e-3), lambda *_: 1e-4))
    root = ElementTree.fromstring(picture)
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("F" in t for t in titles) == 12
    assert sum("B" in t for t in titles) == 12
    assert sum(">" in t.split(" on ")[0] for t in titles) == 16
    evil = Timeline("<script>alert(1)</script>", 1, (Span(0, "compute", "<img onerror=x>", 0, 1, "<b>"),))
    ElementTree.fromstring(gantt_svg(evil))
    assert "<script" not in gantt_svg(evil)
    assert "<img" not in gantt_svg(evil)
    assert "<b>" not in gantt_svg(evil)


def test_a_rank_with_several_stages_shows_which() -> None:
    timeline = simulate(Program.parse("rank 0: 0F0 1F0 1B0 0B0"), lambda action: 1.0, lambda *_: 0.0)
    assert "|0F0==1F0==1B0==0B0==|" in gantt_text(timeline, 20).plain
    assert ">1.0</text>" in gantt_svg(timeline)


def test_a_busy_rank_looks_busy_however_many_spans_it_has() -> None:
    timeline = simulate(build("1f1b", 1, 3000), per_op(1.0), lambda *_: 0.0)
    row = gantt_text(timeline, 50).plain.splitlines()[1]
    assert "." not in row.partition("|")[2].partition("|")[0]
    bars = [
        float(r.get("width", 0))
        for r in ElementTree.fromstring(gantt_svg(timeline)).iter("{http://www.w3.org/2000/svg}rect")
        if r.get("y") == "58"
    ]
    assert sum(bars[1:]) > 0.5 * bars[0]
    assert len(bars) < 4000
