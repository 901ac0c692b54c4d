"""Layers that are repeated several at a time: what a layout says, what is kept against a closed form, what the planner chooses."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.changes import refit_layout
from shardwise.cluster.cluster import Cluster, ClusterLevel, Device, NetworkLink
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.balance import select_cuts
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.layout import Layout
from shardwise.plan.residency import split_segments
from shardwise.solve.constraints import parse_constraints
from shardwise.solve.search import price, search, simulate_time
from shardwise.solve.space import SearchSpace
from tests.support.gpt_graph import gpt


def cluster(memory_bytes: float, devices: int = 1) -> Cluster:
    device = Device("gpu", "gpu", (("float32", 1e12),), memory_bytes, 1e12, 1.0, 5e-6)
    return Cluster("gpus", device, (ClusterLevel("node", devices, NetworkLink(3e-6, 2e10)),))


@given(st.lists(st.booleans()), st.integers(1, 5))
def test_only_what_is_repeated_goes_together_and_no_more_than_the_length(row: list[bool], length: int) -> None:
    parts = split_segments(row, length)
    assert [at for first, behind in parts for at in range(first, behind)] == list(range(len(row)))
    for (first, behind), after in zip(parts, [*parts[1:], None][: len(parts)], strict=True):
        assert behind - first == 1 or (all(row[first:behind]) and behind - first <= length)
        if after is not None and row[first] and row[after[0]]:  # what could have gone along did
            assert behind - first == length


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("segment=0", "segment=0; it counts something"),
        ("segment=2", "recompute=none recomputes no whole ones; use recompute=full"),
        ("segment=2 recompute=selective", "recompute=selective recomputes no whole ones"),
        ("segment=2 recompute=full offload=activations", "offload=activations is not supported; use offload=none or optimizer"),
        ("segment=2 recompute=full:1 offload=all:1", "offload=all:1 is not supported"),
        ("segment=2 recompute=full data=2 zero=3", "zero=3 is not supported"),
        ("segmnet=2", "did you mean segment"),
        ("recompute_num_layers=2", "segment=2 recomputes layers together"),  # Megatron's word for it
    ],
)
def test_what_cannot_be_is_refused_by_name(words: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Layout.parse(words)


def test_a_layout_says_its_segments_and_loses_them_with_what_they_need() -> None:
    layout = Layout.parse("data=2 recompute=full:3 segment=2 offload=optimizer zero=2")
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse("recompute=full segment=1")) == "data=1 tensor=1 pipeline=1 recompute=full"
    other, moved = refit_layout(layout, {"recompute": "none"}, 2, 8, 8)
    assert (other.segment, moved) == (1, "segment 2 to 1")


@pytest.mark.parametrize("layers", [8, 9])
def test_segments_keep_what_enters_them_and_one_is_there_in_backward(layers: int) -> None:
    """Of L equal layers into which a bytes enter and which keep b: ceil(L/N) a, and of the segment that backward begins with what its
    layers keep. What the head keeps is there too, the same for all."""
    batch, sequence, hidden = 8, 32, 64
    a = 4.0 * batch * sequence * hidden

    def held(count: int, words: str) -> float:
        graph = gpt(count, hidden=hidden, sequence=sequence, batch=batch, vocabulary=16)
        (cost,) = Pricer(graph, cluster(1e11), batch).stages(Layout.parse(f"precision=float32 {words}"))
        return cost.memory.alone.activations

    b = held(layers, "") - held(layers - 1, "")
    alone = held(layers, "recompute=full")
    for length in (2, 3, 4):
        in_last = layers % length or length
        inputs = -(-layers // length)
        found = held(layers, f"recompute=full segment={length}")
        # Backward is at the last segment, or at the one before when the last has given back its input: the fuller of both.
        each = [(in_last - 1) * b, (length - 1) * b - a]
        assert found - alone == pytest.approx(max(each[: 1 + (inputs > 1)]) - (layers - inputs) * a)
    assert held(layers, "recompute=full segment=99") == pytest.approx(held(layers, f"recompute=full segment={layers}"))


def test_time_is_that_of_repeating_all() -> None:
    pricer = Pricer(gpt(8), cluster(1e11), 8)
    one, several = (pricer.stages(Layout.parse(f"recompute=full segment={k}"))[0] for k in (1, 3))
    assert (one.forward_s, one.backward_s) == (several.forward_s, several.backward_s)


def _fitting(pricer: Pricer, every: Iterable[Layout]) -> list[tuple[float, str, Layout]]:
    """Seconds of those that fit."""
    found = []
    for layout in every:
        try:
            priced = price(pricer, layout)
            pricer.check_memory(layout, priced.prediction)
        except Infeasible:
            continue
        found.append((simulate_time(pricer, priced).prediction.step_time_s, str(layout), layout))
    return found


@pytest.mark.parametrize(("devices", "part"), [(1, 0.2), (1, 0.7), (2, 0.5)])
def test_the_planner_finds_segments_where_only_they_fit(devices: int, part: float) -> None:
    """Memory between what the leanest segments need and what layers repeated one at a time do; against every layout of the space."""
    graph = gpt(64, hidden=16, sequence=64, vocabulary=16)
    limits = f"ranks={devices} microbatches=1 pipeline=1 offload=none zero=0 precision=float32"
    wide = Pricer(graph, cluster(1e11), 8)
    need = {k: price(wide, Layout.parse(f"data={devices} recompute=full segment={k}")).prediction.memory.total for k in (1, 2, 4)}
    leanest = min(need.values())
    assert leanest < need[1]
    here = cluster(leanest + part * (need[1] - leanest), devices)
    plan = search(graph, here, 8, "gpt", limits)
    pricer = Pricer(graph, here, 8)
    space = SearchSpace(here, 8, parse_constraints(limits), len(pricer.cuts) + 1, len(select_cuts(pricer.cuts, 1)) + 1, num_blocks=64)
    fitting = _fitting(pricer, (layout for base in space.bases() for layout in space.variants(base)))
    assert plan.prediction is not None
    # Of fewer layers in whole segments as well, every number.
    some = [
        Layout.parse(f"data={devices} recompute=full:{count} segment={k} precision=float32") for k in (2, 4, 8) for count in range(k, 64, k)
    ]
    best = min(*fitting, *_fitting(pricer, some))[0]
    assert plan.prediction.step_time_s <= 1.004 * best
    assert plan.bound_gap is not None
    assert plan.bound_gap >= -1e-9
    assert plan.prediction.step_time_s / (1 + plan.bound_gap) <= best * (1 + 1e-9)
    if devices == 1:
        assert all(layout.segment > 1 for _, _, layout in fitting)
        assert plan.layout.segment > 1
        assert "only the input of the first of them is saved" in dict(plan.reasons)["segment"]
        with pytest.raises(Infeasible, match="without segment=1"):
            search(graph, here, 8, "gpt", f"{limits} segment=1")


def test_nothing_is_repeated_together_where_there_is_room_but_as_it_is_asked_for() -> None:
    limits = "recompute=full precision=float32 microbatches=1"
    for words, segment in (("", 1), (" segment=3", 3)):
        assert search(gpt(6), cluster(1e11), 8, "gpt", limits + words).layout.segment == segment
