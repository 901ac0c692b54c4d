"""Tables and pages: against numbers worked out by hand, and against names that try to be markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UsageError
from shardwise.plan.ir.timeline import Span, Timeline
from shardwise.plan.layout import Layout
from shardwise.plan.plan import LayoutCandidate, MemoryBreakdown, Plan, Prediction
from shardwise.plan.plan_file import write_plan
from shardwise.report.chart import BarRow, Series, axis_ticks, compared_bars, line_chart, smooth_points, stacked_bar, thin_points
from shardwise.report.page import PageSubject, page_html
from shardwise.report.run_folder import read_folder, read_metrics, read_trace
from shardwise.report.tables import TextTable, candidates_table, memory_table, parts_table, plan_record, plan_tables, summary_table

NASTY = '<script>alert("1")</script>\'"&[bold]'
MEMORY = MemoryBreakdown(parameters=2**20, gradients=2**20, optimizer=2**21)
FAST = Prediction(0.5, 0.4, 1e12, MEMORY, (("gradients", 0.1), ("compute", 0.4)))
SLOW = Prediction(1.0, 0.2, 1e12, MEMORY)
PLAN = Plan(
    Layout(data=2, pipeline=2, microbatches=4),
    NASTY,
    NASTY,
    64,
    stages=(NASTY,),
    prediction=FAST,
    reasons=((NASTY, NASTY),),
    candidates=(
        LayoutCandidate(Layout(data=4), SLOW, NASTY),
        LayoutCandidate(Layout(data=2, pipeline=2, microbatches=4), FAST),
        LayoutCandidate(Layout(data=8), None, NASTY),
    ),
    replicated_operators=(NASTY,),
)
TIMELINE = Timeline(NASTY, 2, (Span(0, "compute", NASTY, 0.0, 1.0, NASTY), Span(1, "compute", "1F0", 1.0, 2.0, "F")))


class Tags(HTMLParser):
    """What a browser would make of a page: its tags, its attributes and its words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def nasty_subject() -> PageSubject:
    return PageSubject(
        NASTY,
        NASTY,
        PLAN,
        tuple({"step": float(i), "loss": 5.0 - i, "tokens_per_s": 10.0, "eval_loss": 4.0} for i in range(3)),
        ((NASTY, 4.6),),
        TIMELINE,
        TIMELINE,
        ((NASTY, NASTY),),
        ((NASTY, NASTY),),
        NASTY,
        NASTY,
        (NASTY,),
        1e9,
    )


def test_no_name_becomes_markup() -> None:
    seen = Tags(page_html(nasty_subject()))
    assert "script" not in seen.tags
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "".join(seen.words).count("alert") >= 10


def test_a_page_that_does_not_escape_is_seen_by_this_test() -> None:
    assert "script" in Tags(page_html(nasty_subject()).replace("&lt;", "<").replace("&gt;", ">")).tags


def test_a_page_loads_nothing() -> None:
    text = page_html(nasty_subject())
    seen = Tags(text)
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(seen.tags)
    assert not [value for name, value in seen.attributes if name in ("src", "href")]
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text


def test_every_tag_is_closed() -> None:
    text = page_html(nasty_subject())
    for tag in ("section", "div", "table", "tr", "td", "figure", "svg", "main", "ul", "li"):
        assert text.count(f"<{tag}>") + text.count(f"<{tag} ") == text.count(f"</{tag}>"), tag


def test_a_page_about_nothing_is_a_page() -> None:
    assert "<h1>x</h1>" in page_html(PageSubject("x"))


def test_candidates_are_in_order_of_time_and_the_chosen_is_marked() -> None:
    table = candidates_table(PLAN)
    assert [row[1] for row in table.rows] == ["500 ms", "1.00 s", ""]
    assert [row[2] for row in table.rows] == ["1.00x", "2.00x", ""]
    assert table.marked == (0,)
    assert candidates_table(PLAN, most=1).note == "2 more were considered"


def test_shares_of_memory_and_time_are_of_the_total() -> None:
    assert [row[1:] for row in memory_table(MEMORY, 0.0).rows if row[0] in ("optimizer", "total")] == [
        ("2.00 MiB", "50.0 %"),
        ("4.00 MiB", "100.0 %"),
    ]
    assert parts_table(FAST).rows == (("compute", "400 ms", "80.0 %"), ("gradients", "100 ms", "20.0 %"))


def test_the_summary_divides_the_batch() -> None:
    rows = dict(summary_table(PLAN).rows)
    assert rows["batch"] == "64 samples a step: 2 x 4 microbatches of 8"
    assert rows["throughput"] == "128 samples/s"


def test_a_plan_without_prediction_still_has_tables() -> None:
    bare = replace(PLAN, prediction=None, candidates=())
    assert [table.title for table in plan_tables(bare)] == ["Plan", "Why"]
    assert plan_record(bare)["step_time_s"] is None


def test_the_record_has_the_keys_that_programs_rely_on() -> None:
    record = json.loads(json.dumps(plan_record(PLAN)))
    assert {"layout", "step_time_s", "mfu", "model_flops", "memory_bytes", "planning_time_s", "bound_gap", "candidates"} <= set(record)
    assert set(record["memory_bytes"]) == {"parameters", "gradients", "optimizer", "activations", "buffers", "margin", "total"}
    assert record["memory_bytes"]["total"] == 2**22
    assert Layout.parse(record["layout"]) == PLAN.layout


def test_a_table_with_a_short_row_cannot_be_built() -> None:
    with pytest.raises(UsageError, match="2 columns"):
        TextTable("t", ("a", "b"), (("1",),))


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e9))
def test_ticks_enclose_the_range_and_are_few(low: float, length: float) -> None:
    found = axis_ticks(low, low + length)
    assert found[0] <= low + 1e-6 * length
    assert found[-1] >= low + length - 1e-6 * length
    assert 2 <= len(found) <= 8
    steps = {round(b - a, 9) for a, b in pairwise(found)}
    assert max(steps) == pytest.approx(min(steps), rel=1e-3, abs=1e-6)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e-6))
def test_a_flat_line_can_be_drawn(low: float, length: float) -> None:
    assert line_chart([Series("loss", ((0.0, low), (1.0, low + length)))], "step", "loss")


def test_the_mean_of_a_constant_is_the_constant() -> None:
    assert [y for _, y in smooth_points([(float(i), 3.0) for i in range(5)])] == pytest.approx([3.0] * 5)


@given(st.integers(0, 5000), st.integers(1, 700))
def test_thinning_keeps_the_ends(length: int, most: int) -> None:
    points = [(float(i), 0.0) for i in range(length)]
    kept = thin_points(points, most)
    assert len(kept) <= most + 1
    assert list(kept[:1]) == points[:1]
    assert list(kept[-1:]) == points[-1:]


def test_a_chart_leaves_out_what_is_not_a_number() -> None:
    assert line_chart([Series("loss", ((0.0, float("nan")),))], "step", "loss") == ""
    assert "nan" not in line_chart([Series("loss", ((0.0, float("nan")), (1.0, 2.0), (2.0, 3.0)))], "step", "loss")


def test_a_bar_is_as_long_as_its_parts() -> None:
    text = stacked_bar([("a", 1.0, ""), ("b", 3.0, "")], total=8.0)
    assert "width:12.500%" in text
    assert "width:37.500%" in text


def test_bars_share_a_scale() -> None:
    rows = [
        BarRow("<a>", (("x", 1.0), ("y", 1.0)), "2", str),
        BarRow("b", (("x", 4.0),), "4", str, is_chosen=True),
        BarRow("empty", (), "0", str),
    ]
    text = compared_bars(rows, ("all there is", 8.0))
    assert [float(w) for w in re.findall(r"<i style=\"width:([0-9.]+)%", text)] == [12.5, 12.5, 50.0]
    assert "left:100.000%" in text
    assert "&lt;a&gt;" in text
    assert "empty" not in text
    assert compared_bars([]) == ""


def test_a_page_compares_the_candidates_that_were_priced() -> None:
    text = page_html(PageSubject("x", plan=PLAN, memory_limit_bytes=2.0**23))
    assert text.count("Candidates: ") == 2
    assert text.count('class="row mark"') == 2  # the chosen one, by time and by memory
    assert text.count('class="row off"') == 1  # the refused one, by memory: it has no parts of its time
    assert "Candidates: " not in page_html(PageSubject("x", plan=replace(PLAN, candidates=())))


def test_a_run_folder_without_its_end_is_still_shown(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.toml")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "word": "x"}\n{"step": 2, "loss": 4.5}\n{"step": 3, "lo')
    (tmp_path / "timeline.json").write_text(TIMELINE.to_perfetto())
    subject = read_folder(tmp_path)
    assert subject.metrics == ({"step": 1.0, "loss": 5.0}, {"step": 2.0, "loss": 4.5})
    assert subject.plan == PLAN
    assert subject.measured is not None
    assert subject.measured.total_s == pytest.approx(2.0)
    assert [name for name, _ in subject.files] == ["plan.toml", "metrics.jsonl", "timeline.json"]
    assert "script" not in Tags(page_html(subject)).tags


def test_damaged_lines_are_told_and_the_page_does_without(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n\xff\n{"step": 5}\n{"step": 5}\n[]\n{"step": 6')
    assert read_metrics(path) == ({"step": 1.0}, {"step": 5.0})
    assert "metrics.jsonl: line 2 to 3, 5 to 6 is damaged and the row of step 2 to 4 is gone" in read_folder(tmp_path).lead


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"kind": "shardwise timeline"}', "nonsense"])
def test_what_is_no_timeline_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_trace(path)


def test_both_forms_of_a_timeline_are_read(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(TIMELINE.to_json())
    assert read_trace(path) == TIMELINE


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        read_folder(tmp_path)
