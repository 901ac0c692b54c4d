"""plan.toml: what is read equals what was written, and whatever else is in the file is refused with its line."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError, Infeasible, LayoutError, ShardwiseError, UsageError
from shardwise.plan.ir.schedule_sizes import SCHEDULES, refuse_sizes
from shardwise.plan.layout import Layout
from shardwise.plan.plan import LayoutCandidate, MemoryBreakdown, Plan, Prediction
from shardwise.plan.plan_file import SHARD_AXES, format_plan, parse_plan, read_plan, write_plan

counts = st.integers(1, 4)
texts = st.text(max_size=12)
numbers = st.floats(allow_nan=False)
sizes = st.tuples(st.sampled_from(SCHEDULES), counts).filter(lambda pair: not refuse_sizes(*pair))
layouts = sizes.flatmap(
    lambda pair: st.builds(
        Layout, data=counts, tensor=counts, pipeline=counts, microbatches=st.just(pair[1]), schedule=st.just(pair[0]),
        zero=st.integers(0, 3), precision=st.sampled_from(["float32", "bfloat16"]), threads=st.integers(0, 3),
    )
)  # fmt: skip
predictions = st.builds(
    Prediction,
    numbers,
    numbers,
    numbers,
    st.builds(MemoryBreakdown, *[numbers] * 6),
    st.lists(st.tuples(texts, numbers), max_size=3).map(tuple),
)
candidates = st.builds(LayoutCandidate, layouts, st.none() | predictions, texts)
cuts = st.dictionaries(texts, st.integers(0, 3), max_size=3).map(lambda d: tuple(d.items()))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layout = draw(layouts)
    return Plan(
        layout,
        model=draw(texts),
        cluster=draw(texts),
        batch_size=layout.data * layout.microbatches * draw(counts),
        stages=tuple(draw(st.lists(texts, min_size=layout.num_stages - 1, max_size=layout.num_stages - 1))),
        shards=tuple(draw(st.dictionaries(st.sampled_from(SHARD_AXES), cuts, max_size=2)).items()),
        prediction=draw(st.none() | predictions),
        reasons=tuple(draw(st.lists(st.tuples(texts, texts), max_size=3))),
        candidates=tuple(draw(st.lists(candidates, max_size=3))),
        replicated_operators=tuple(draw(st.lists(texts, max_size=3))),
        uncaptured=draw(texts),
        planning_time_s=draw(st.floats(0, 100)),
    )


PLAN = Plan(
    Layout(data=2, tensor=2, pipeline=2, microbatches=4),
    model="gpt:layers=4",
    cluster="here",
    batch_size=16,
    stages=("h.2.attention/linear",),
    shards=(("tensor", (("h.*.mlp.up.weight", 0), ("h.*.mlp.down.weight", 1))),),
    prediction=Prediction(0.5, 0.4, 1e12, MemoryBreakdown(parameters=4e7, gradients=4e7), (("compute", 0.4), ("tensor", 0.1))),
    reasons=(("tensor", "two ranks share a cache"), ("data", 'the rest, "as ever"')),
    candidates=(
        LayoutCandidate(Layout(data=8), Prediction(0.6, 0.3, 1e12, MemoryBreakdown(), ())),
        LayoutCandidate(Layout(tensor=8), None, "needs 8 heads, there are 4"),
    ),
    planning_time_s=0.25,
)
TEXT = format_plan(PLAN)


@given(plans())
def test_what_is_read_equals_what_was_written(plan: Plan) -> None:
    again = parse_plan(format_plan(plan))
    assert again == plan
    assert again.planning_time_s == plan.planning_time_s
    assert format_plan(again) == format_plan(plan)


def test_a_file_round_trip_leaves_nothing_else(tmp_path: Path) -> None:
    write_plan(PLAN, tmp_path / "plan.toml")
    write_plan(replace(PLAN, model="other"), tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").model == "other"
    assert [f.name for f in tmp_path.iterdir()] == ["plan.toml"]


def test_a_person_can_write_a_short_one() -> None:
    plan = parse_plan(
        'kind = "shardwise plan"\nformat_version = 1\nmodel = "gpt"\ncluster = "here"\nbatch_size = 8\n[layout]\ndata = 2\nmicrobatches = 2\n'  # noqa: E501
    )
    assert plan == Plan(Layout(data=2, microbatches=2), "gpt", "here", 8)


def edited(old: str, new: str) -> str:
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def line(text: str) -> int:
    return 1 + next(i for i, row in enumerate(TEXT.splitlines()) if row.startswith(text))


REFUSED = [
    ("kind = ", 'kinf = "x"\nkind = ', f"line {line('kind')}: unknown key kinf; did you mean kind"),
    ("data = 2", "dta = 2", f"line {line('data = ')}: unknown key dta in .layout.; did you mean data"),
    ("[prediction]", "[predictions]", f"line {line('[prediction]')}: unknown key predictions; did you mean prediction"),
    ("gradients = ", "gradient = ", f"line {line('gradients')}: unknown key gradient in .prediction.memory_bytes.; did you mean gradients"),
    ("batch_size = 16", "batchsize = 16", f"line {line('batch_size')}: unknown key batchsize; did you mean batch_size"),
    ("batch_size = 16", "", "the top lacks batch_size = ..., a whole number"),
    ("batch_size = 16", 'batch_size = "16"', f'line {line("batch_size")}: batch_size has "16", but it takes a whole number'),
    ("batch_size = 16", "batch_size = true", "batch_size has true, but it takes a whole number"),
    ("batch_size = 16", "batch_size = 16.0", "batch_size has 16.0, but it takes a whole number"),
    ("schedule = \"1f1b\"", "schedule = 1", f"line {line('schedule')}: schedule has 1, but it takes text in quotes"),
    ('"h.*.mlp.up.weight" = 0', '"h.*.mlp.up.weight" = "0"', f"line {line(chr(34) + 'h.*.mlp.up')}: .*it takes a whole number"),
    ("step_time_s = 0.5", "", "prediction. lacks step_time_s"),
    ("format_version = 1", "format_version = 2", f"line {line('format_version')}: format version 2 is newer than 1.*update shardwise"),
    ("format_version = 1", "format_version = 0", "format version 0 does not exist"),
    ('kind = "shardwise plan"', 'kind = "shardwise cluster"', 'kind is "shardwise cluster"; a plan has kind = "shardwise plan"'),
    ("[layout]", "[layout", r"plan.toml: .*line \d+"),
    ('["tensor", "two ranks share a cache"]', '["tensor"]', f"line {line('reasons')}: a row of reasons has 1 entries, but it takes 2"),
    ('["data=1 tensor=8 pipeline=1", ', '["data=1 tenser=8", ', "a candidate's layout: unknown layout key tenser .did you mean tensor"),
    ('["data=1 tensor=8 pipeline=1", ', "[8, ", "candidates has 8, but it takes text in quotes"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "reason"), REFUSED, ids=[new or f"without {old}" for old, new, _ in REFUSED])
def test_what_is_wrong_is_refused_with_its_line(old: str, new: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_plan(edited(old, new))


def test_a_plan_that_cannot_be_is_refused_with_its_file_and_kind_of_error() -> None:
    with pytest.raises(Infeasible, match=r"mine.toml: a batch of 5 samples has 2 for each of"):
        parse_plan(edited("batch_size = 16", "batch_size = 5"), "mine.toml")
    with pytest.raises(LayoutError, match=r"mine.toml: schedule=1f2b is unknown"):
        parse_plan(edited('"1f1b"', '"1f2b"'), "mine.toml")


@given(st.integers(0, len(TEXT) - 1), st.characters(exclude_categories=["Cs"]))
def test_one_changed_character_is_refused_or_read_but_never_anything_else(at: int, character: str) -> None:
    with suppress(ShardwiseError):
        parse_plan(TEXT[:at] + character + TEXT[at + 1 :])


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the plan .*No such file"):
        read_plan(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        read_plan(tmp_path / "binary.toml")
    with pytest.raises(UsageError, match=r"cannot write the plan to .*choose a folder"):
        write_plan(PLAN, tmp_path / "none" / "plan.toml")
    with pytest.raises(UsageError, match="cuts a parameter twice over axis tensor"):
        format_plan(replace(PLAN, shards=(("tensor", (("a", 0), ("a", 1))),)))


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 5000, "\x00", "a = 1\r"])
def test_text_beyond_all_bounds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"plan.toml: "):
        parse_plan(text)


def test_every_choice_is_commented_and_defaults_are_left_out() -> None:
    every = Layout(4, 2, 2, 4, "interleaved", 3, "selective", "bfloat16", 1, 2, 2, "on", "on", "all")
    stages = ("a", "b", "c")
    for line in format_plan(Plan(every, "m", "c", 16, stages=stages)).partition("[layout]")[2].splitlines()[1:]:
        if " = " not in line:
            break
        assert "  # " in line
    short = format_plan(Plan(Layout(), "m", "c", 1))
    assert "threads" not in short
    assert parse_plan(short).layout == Layout()
