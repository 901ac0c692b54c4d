"""Choices of all-reduce algorithms: what they say for a size, their text, and that a plan file keeps them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cluster.cluster import Cluster
from weft.errors import UsageError
from weft.plan.choice import NAMES, Choices
from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.plan.store import format_plan, read_plan, write_plan
from weft.solve.sums import sums_of

NAME = st.sampled_from(NAMES)
CHOICES = st.builds(
    lambda sizes, names, above: Choices(tuple(zip(sorted(sizes), names, strict=False)), above),
    st.sets(st.integers(0, 10**12), max_size=5),
    st.lists(NAME, min_size=5, max_size=5),
    NAME,
)


@given(CHOICES, st.integers(0, 10**12))
def test_the_first_row_that_is_large_enough_says(choices: Choices, size: int) -> None:
    fitting = [name for up_to, name in choices.rows if size <= up_to]
    assert choices.of(size) == (fitting[0] if fitting else choices.above)
    assert set(choices.names) == {name for _, name in choices.rows} | {choices.above}


@given(CHOICES)
def test_the_text_reads_back(choices: Choices) -> None:
    assert Choices.parse(str(choices)) == choices


def test_a_plan_keeps_its_choices(tmp_path: Path) -> None:
    plan = Plan(
        Layout(data=4, all_reduce="auto"), "gpt:layers=4", "here", 8, sums=Choices(((4096, "tree"), (10**6, "ring")), "hierarchical")
    )
    write_plan(plan, tmp_path / "plan.toml")
    read = read_plan(tmp_path / "plan.toml")
    assert read.sums == plan.sums
    assert read.all_reduce.of(5000) == "ring"
    named = replace(plan, layout=Layout(data=4, all_reduce="double_tree"))
    write_plan(named, tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").all_reduce == Choices(above="double_tree")
    assert "[sums]" not in format_plan(replace(plan, sums=Choices()))


def test_a_wrong_choice_in_a_plan_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_plan(Plan(Layout(data=4), "gpt:layers=4", "here", 8, sums=Choices(((4096, "tree"),))), path)
    path.write_text(path.read_text().replace("tree to", "treee to"))
    with pytest.raises(UsageError, match=r"treee is unknown \(did you mean tree\?\)"):
        read_plan(path)


def test_auto_is_native_where_nothing_beats_it() -> None:
    assert sums_of(Cluster.parse("2xp4d.24xlarge"), Layout(data=16)) == Choices()
    assert sums_of(Cluster.parse("1xcpu-2"), Layout(data=2)) == Choices()
    assert sums_of(Cluster.parse("4xcpu-2"), Layout(data=8)).of(1 << 25) == "hierarchical"
    assert sums_of(Cluster.parse("4xcpu-2"), Layout(data=4, tensor=2)) == Choices()  # one replica a host
    assert sums_of(Cluster.parse("2xcpu-2"), Layout(data=2, pipeline=2)).of(1 << 20) == "hierarchical"  # replicas inside, stages between
    assert sums_of(Cluster.parse("4xcpu-2"), Layout(data=8, all_reduce="ring")) == Choices()
