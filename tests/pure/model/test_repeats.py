"""Layers that repeat, against how the graph was built."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.model.graph import Graph, Ref
from tests.support.gpt_graph import gpt
from tests.support.placements_oracle.repeats import Run, representatives, runs
from tests.support.small_graphs import Builder, chain


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9))
def test_layers_of_a_gpt_are_one_run(layers: int) -> None:
    graph = gpt(layers=layers)
    (run,) = runs(graph)
    assert (run.length, run.count) == (20, layers)
    same = representatives(graph)
    for i in range(run.start, run.stop):
        first = graph.operators[run.start + (i - run.start) % run.length]
        assert same[graph.operators[i].name] == first.name
        assert first.target == graph.operators[i].target
    assert len(set(same.values())) == len(graph.operators) - 20 * (layers - 1)


def test_one_layer_repeats_nothing() -> None:
    graph = gpt(layers=1)
    assert runs(graph) == ()
    assert set(representatives(graph).items()) == {(op.name, op.name) for op in graph.operators}


def test_a_layer_that_differs_ends_the_run() -> None:
    graph = gpt(layers=6)
    gelus = [i for i, op in enumerate(graph.operators) if "gelu" in op.target]
    operators = list(graph.operators)
    operators[gelus[3]] = replace(operators[gelus[3]], target="aten.relu.default")
    found = runs(replace(graph, operators=tuple(operators)))
    assert [run.count for run in found] in ([3, 2], [2, 2], [3]), "the fourth is alone"
    broken = {i for run in found for i in range(run.start, run.stop)}
    assert gelus[3] not in broken


def test_a_layer_that_reads_otherwise_ends_the_run() -> None:
    """The fourth layer reads the first one's sum in place of the third's: alike operator by operator, and no repetition."""
    graph = gpt(layers=6)
    sums = [op.outputs[0] for op in graph.operators if "add" in op.target]  # two a layer
    operators = list(graph.operators)
    at = next(i for i, op in enumerate(operators) if "layer_norm" in op.target and op.inputs[0] == sums[5])
    operators[at] = replace(operators[at], args=(Ref(sums[1]), *operators[at].args[1:]))
    assert max(run.count for run in runs(replace(graph, operators=tuple(operators)))) <= 3


def test_pairs_of_equal_products_stay_pairs() -> None:
    """Eight equal layers of one product each repeat as four pairs, so that columns and rows can alternate."""
    graph = chain([(kind, 2 * i + j, 0) for i in range(8) for j, kind in enumerate(("linear", "gelu"))])
    (run,) = runs(graph)
    assert (run.length, run.count) == (4, 4)


def test_parallel_branches_are_no_layers() -> None:
    b = Builder(x=(8, 8))
    made = []
    for i in range(4):
        y = b.call("linear.default", (8, 8), Ref("x"), b.parameter(f"a{i}", 8, 8))
        made.append(b.call("linear.default", (8, 8), y, b.parameter(f"b{i}", 8, 8)))
    assert runs(b.graph(made[-1], 8)) == ()


def test_the_empty_graph() -> None:
    assert runs(Graph((), (), (), (), (), {}, "loss", 1)) == ()


@pytest.mark.parametrize("sizes", [(-1, 1, 2), (0, 0, 2), (0, 1, 1)])
def test_a_run_that_is_none_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="a run of"):
        Run(*sizes)
