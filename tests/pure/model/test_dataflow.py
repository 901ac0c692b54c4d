"""Data flow on a graph written down here, against what is read off it; analyses that a graph keeps."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.model.dataflow import cached_on_graph, propagate_backward, propagate_forward, required_operators
from shardwise.model.graph import Graph, Operator, Ref, Tensor


def _operator(name: str, inputs: str, output: str) -> Operator:
    return Operator(name, "aten.add.Tensor", tuple(Ref(v) for v in inputs), (), (output,), name)


# a, b -> c; c -> d; b -> e
OPERATORS = (_operator("f", "ab", "c"), _operator("g", "c", "d"), _operator("h", "b", "e"))


def test_facts_reach_what_is_computed_from_them_and_what_they_are_computed_from() -> None:
    assert propagate_forward(OPERATORS, "a") == set("acd")
    assert propagate_forward(OPERATORS, "b") == set("bcde")
    assert propagate_backward(OPERATORS, "d") == set("dcab")
    assert propagate_backward(OPERATORS, "e") == set("eb")
    assert [op.name for op in required_operators(OPERATORS, "d")] == ["f", "g"]


def _analysis(result: str, calls: list[str]) -> Callable[[Graph], str]:
    @cached_on_graph
    def analyze(graph: Graph) -> str:
        calls.append(result)
        return result

    return analyze


def test_a_graph_keeps_each_analysis_by_itself() -> None:
    calls: list[str] = []
    first, second = _analysis("first", calls), _analysis("second", calls)  # of one name
    graph, other = (Graph((), (), (), (), OPERATORS, {v: Tensor((2,), "float32") for v in "abcde"}, "d", 2) for _ in range(2))
    assert [first(graph), second(graph), first(graph), first(other)] == ["first", "second", "first", "first"]
    assert calls == ["first", "second", "first"]
