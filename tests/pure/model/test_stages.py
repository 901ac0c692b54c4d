"""Cutting a graph into stages, against enumeration: every value is where it is read, and nothing crosses that need not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable
from shardwise.model.stages.stages import batch_only_operators, split, stage_cuts, stage_links
from tests.support.gpt_graph import gpt


def dag(edges: list[tuple[int, int]], from_batch: list[bool]) -> Graph:
    """Operator i adds up two earlier values (0 is the batch x, 1 the parameter w, then outputs); some read the batch alone."""
    tensors = {"x": Tensor((4,), "float32"), "w": Tensor((4,), "float32")}
    names = ["x", "w"]
    operators = []
    batch_only = ["x"]
    for i, ((a, b), free) in enumerate(zip(edges, from_batch, strict=True)):
        if free:
            args = (Ref(batch_only[a % len(batch_only)]), 1.0)
        else:
            args = (Ref(names[a % len(names)]), Ref(names[b % len(names)]))
        name = f"y{i}"
        operators.append(Operator(name, "aten.add.Tensor", args, (), (name,), f"m.{i}/add"))
        tensors[name] = Tensor((4,), "float32")
        names.append(name)
        if free:
            batch_only.append(name)
    operators.append(Operator("loss", "aten.add.Tensor", (Ref(names[-1]), Ref("w")), (), ("loss",), "end/add"))
    tensors["loss"] = Tensor((4,), "float32")
    x, w = Variable("x", "x", tensors["x"], batched=True), Variable("w", "w", tensors["w"], trainable=True)
    return Graph((w,), (), (x,), (), tuple(operators), tensors, "loss", 4)


EDGES = st.lists(st.tuples(st.tuples(st.integers(0, 9), st.integers(0, 9)), st.booleans()), min_size=3, max_size=9)


@settings(max_examples=150, deadline=None)
@given(EDGES, st.data())
def test_every_stage_has_what_it_reads_and_no_more(drawn: list[tuple[tuple[int, int], bool]], data: st.DataObject) -> None:
    graph = dag([edge for edge, _ in drawn], [free for _, free in drawn])
    places = [op.site for op in graph.operators if op.name not in batch_only_operators(graph)][1:]
    wanted = set(data.draw(st.lists(st.sampled_from(places), unique=True, max_size=3))) if places else set()
    sites = [site for site in places if site in wanted]
    stages = split(graph, sites)
    assert len(stages) == len(sites) + 1
    free = batch_only_operators(graph)
    variables = {v.value for v in graph.variables}
    for stage in stages:
        had = set(stage.variables) | {v for _, values in stage.receives for v in values}
        assert not {v for _, values in stage.receives for v in values} & variables, "variables never cross"
        for op in stage.operators:
            assert set(op.inputs) <= had, f"{op.name} reads what stage {stage.index} does not have"
            had |= set(op.outputs)
        assert set(stage.results) <= had
        read = {v for op in stage.operators for v in op.inputs} | set(stage.results)
        assert {v for _, values in stage.receives for v in values} <= read, "nothing is received in vain"
        for other, values in stage.receives:
            assert other < stage.index
            assert dict(stages[other].sends)[stage.index] == values
            made = {v for op in stages[other].operators for v in op.outputs}
            assert set(values) <= made, "it comes from where it is made"
            makers = {op.name for op in graph.operators if set(op.outputs) & set(values)}
            assert not makers & free, "what follows from the batch never crosses"
    not_free = [op.name for op in graph.operators if op.name not in free]
    assert sorted(n for s in stages for n in (op.name for op in s.operators) if n in set(not_free)) == sorted(not_free), "each runs once"
    assert [s.index for s in stages if "loss" in s.results] == [len(stages) - 1]
    assert stage_links(stages) == tuple(sorted({(p, s.index) for s in stages for p, _ in s.receives}))


def test_a_skip_goes_straight_to_where_it_is_read() -> None:
    # y0 = x+w, y1 = y0+w, y2 = y1+w, y3 = y2+y0: y0 skips the middle stage.
    graph = dag([(0, 1), (2, 1), (3, 1), (4, 2)], [False] * 4)
    stages = split(graph, ["m.1/add", "m.3/add"])
    assert stage_links(stages) == ((0, 1), (0, 2), (1, 2))
    assert stages[0].sends == ((1, ("y0",)), (2, ("y0",)))
    assert stages[2].receives == ((0, ("y0",)), (1, ("y2",)))


def test_what_follows_from_the_batch_is_made_twice_and_not_sent() -> None:
    # y0 = x+1 is read by both stages.
    graph = dag([(0, 0), (2, 1), (3, 2)], [True, False, False])
    stages = split(graph, ["m.2/add"])
    assert [[op.name for op in s.operators] for s in stages] == [["y0", "y1"], ["y0", "y2", "loss"]]
    assert stages[1].receives == ((0, ("y1",)),)
    assert stages[1].variables == ("w", "x")


def test_the_places_where_a_gpt_is_cut_cross_one_activation() -> None:
    graph = gpt(layers=2, hidden=64, sequence=32, batch=8)
    found = {cut.site.split("/")[0]: cut for cut in stage_cuts(graph) if "layer_norm" in cut.site and ".ln1" in cut.site}
    assert set(found) == {"h.0.ln1", "h.1.ln1"}
    for cut in found.values():
        assert len(cut.values) == 1
        assert cut.size_bytes == 8 * 32 * 64 * 4


def test_cuts_say_what_split_sends() -> None:
    graph = gpt(layers=2)
    for cut in stage_cuts(graph):
        stages = split(graph, [cut.site])
        assert set(cut.values) == {v for _, values in stages[1].receives for v in values}


@pytest.mark.parametrize(
    ("sites", "message"),
    [
        (["nowhere/add"], "begins a stage at 'nowhere/add', but the model has no such operator"),
        (["m.2/add", "m.1/add"], "begins before or with the one before it"),
        (["m.1/add", "m.1/add"], "begins before or with the one before it"),
        (["m.0/add"], "begins before or with the one before it"),
    ],
)
def test_wrong_sites_are_refused(sites: list[str], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        split(dag([(0, 1), (2, 1), (3, 1)], [False] * 3), sites)
