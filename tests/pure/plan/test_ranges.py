"""Lists of layers as ranges: what is written is read back as the same layers, the shorter the better, in every place that holds one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.errors import LayoutError, UsageError
from shardwise.plan.bound import describe_bound
from shardwise.plan.ir.ranges import escape_name, read_counts, read_names, write_counts, write_names
from shardwise.plan.layout import Layout
from shardwise.plan.plan import MemoryBreakdown, Plan, Prediction
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.plan.residency import LayerChoice, Residency
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.search import search
from tests.support.gpt_graph import gpt

path = st.lists(st.sampled_from(["h", "blocks", "0-1", "a+b", "*", "01", *map(str, range(13))]), min_size=1, max_size=3).map(".".join)
names = st.lists(path, min_size=1, max_size=30, unique=True)


@given(names)
@example(["h.0", "h.1", "h.2", "x.0-1.3", "h.3"])
@example(["1.1", "1.2", "1.3", "2.3", "3.3"])
def test_a_written_list_of_layers_is_read_back(names: list[str]) -> None:
    """Whatever modules are called: each layer of the list is chosen, in every order, and none of those that are called otherwise."""
    text = write_names(map(escape_name, names))
    assert write_names(read_names(text)) == text
    word = f"full:{text}"
    choice = LayerChoice.parse("recompute", word)
    assert str(choice) == word
    others = [name for name in ("h.99", "blocks.99.0", "99") if name not in names]
    assert list(choice.selected_layers(0, [*names, *others])) == names
    layout = Layout.parse(f"recompute={word}")
    assert layout.recompute == word
    assert Layout.parse(str(layout)) == layout


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40).filter(any))
def test_written_counts_are_read_back(counts: list[int]) -> None:
    assert read_counts(write_counts(counts)) == tuple(counts)
    assert read_counts("/".join(map(str, counts))) == tuple(counts)
    assert LayerChoice.parse("offload", f"all:{'/'.join(map(str, counts))}").counts == tuple(counts)


def test_the_old_spelling_is_read_and_written_as_ranges() -> None:
    """A layout of 160 layers one by one is the same layout, of a tenth of the characters."""
    one_by_one = "+".join(f"layers.{i}" for i in range(160) if i != 80)
    old = Layout.parse(f"pipeline=2 microbatches=2 recompute=full:{one_by_one} offload=activations:layers.80")
    assert old.recompute == "full:layers.0-79+layers.81-159"
    assert old == Layout.parse("pipeline=2 microbatches=2 recompute=full:layers.0-79+layers.81-159 offload=activations:layers.80")
    assert len(str(old)) < 0.1 * len(one_by_one)
    assert Layout.parse("pipeline=4 recompute=full:2/2/2/1").recompute == "full:2x3/1"
    plan = Plan(old, "m", "c", 2, ("a.1",), (), Prediction(1.0, 0.5, 1.0, MemoryBreakdown(1.0, 1.0, 1.0, 1.0, 1.0, 1.0), ()))
    text = format_plan(plan)
    assert "full:layers.0-79+layers.81-159" in text
    assert parse_plan(text.replace("layers.0-79+layers.81-159", one_by_one)) == plan


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("full:h.6-2", "goes from 6 down to 2"),
        ("full:h.0-999999999", "names 1000000000 layers"),
        ("full:9x100001/1", "counts layers of more than 100000 stages"),
        ("full:0x3", "recomputes no layer"),
        ("full:h.0-2+", "layers are counts by stage"),
    ],
)
def test_a_range_that_means_nothing_is_refused(word: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(f"pipeline=2 recompute={word}")


def test_a_range_that_reaches_beyond_the_model_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"full:h\.5: the model has no such layer; it has h\.0-4$"):
        Residency.parse("full:h.3-5", "none").check([["h.0", "h.1", "h.2"], ["h.3", "h.4"]])


def _cluster(memory_bytes: float) -> Cluster:
    device = Device("gpu", "gpu", (("float32", 1e12),), memory_bytes, 1e12, 1.0, 5e-6)
    return Cluster("gpus", device, (ClusterLevel("node", 2, NetworkLink(3e-6, 2e11)),))


def test_a_constraint_names_layers() -> None:
    """The search then has no others, and says so where they cannot be."""
    (one,) = parse_constraints("recompute=full:h.0+h.1+h.2")
    assert str(one) == "recompute=full:h.0-2"
    assert search(gpt(6), _cluster(1e11), 8, "gpt", "recompute=full:h.0-2 pipeline=1").layout.recompute == "full:h.0-2"
    assert search(gpt(6), _cluster(1e11), 8, "gpt", "offload=activations:1").layout.offload == "activations:1"
    with pytest.raises(UsageError, match="layers are asked for, not left out"):
        parse_constraints("recompute!=full:h.0")


def test_proven_is_what_no_layout_beats_and_nothing_more() -> None:
    """A plan's gap stands beside what is proven; without a bound nothing is said to be."""
    least, _, above = describe_bound(1.5, 0.5).partition("; ")
    assert least == "proven: no layout that the search admits takes less than 1.00 s a step"
    assert above == "this plan takes 50.0 % more, and nothing is known in between"
    assert describe_bound(1.5, None).startswith("nothing is proven: ")
    plan = search(gpt(6), _cluster(1e11), 8, "gpt")
    assert plan.bound_gap is not None
    assert plan.prediction is not None
    assert dict(plan.reasons)["bound"] == describe_bound(plan.prediction.step_time_s, plan.bound_gap)
