"""Repeated layers once, against the propagation of the whole graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpt_graph import gpt

from weft.model.fold import fold, propagate
from weft.model.graph import Operator, Ref, Tensor
from weft.model.propagate import propagate as propagate_whole


@pytest.mark.parametrize("layers", [5, 8, 12])
@pytest.mark.parametrize("sizes", [{"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 4}])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_expanded_sharding_is_the_whole_graphs(layers: int, sizes: dict[str, int], sequence: bool) -> None:
    graph = gpt(layers)
    folded = graph.fold
    assert folded is not None
    assert len(folded.small.operators) < len(graph.operators)
    assert propagate(graph, sizes, sequence=sequence) == propagate_whole(graph, sizes, sequence=sequence)


def test_every_operator_has_one_of_its_kind_to_stand_for_it() -> None:
    graph = gpt(9)
    folded = graph.fold
    assert folded is not None
    (run,) = folded.runs
    assert run.count == 9
    for op, name in folded.operator.items():
        assert op.rpartition("_")[0] == name.rpartition("_")[0]
    for value, other in folded.value.items():
        assert graph.tensors[value] == graph.tensors[other]
    assert {v.value for v in folded.small.parameters} <= {v.value for v in graph.parameters}


def test_shards_that_are_given_are_kept() -> None:
    graph = gpt(6)
    found = propagate_whole(graph, {"tensor": 2})
    assert propagate(graph, {"tensor": 2}, found.shards) == propagate_whole(graph, {"tensor": 2}, found.shards)
    odd = {"tensor": found.shards["tensor"][:-3]}  # equal layers cut differently
    assert propagate(graph, {"tensor": 2}, odd) == propagate_whole(graph, {"tensor": 2}, odd)


def test_few_layers_and_layers_that_are_collected_stay_whole() -> None:
    assert gpt(3).fold is None
    graph = gpt(8)
    ends = [op for op in graph.operators if op.target == "aten.gelu.default"]
    tensors = dict(graph.tensors) | {"sum": Tensor(graph.tensors[ends[0].outputs[0]].shape, "float32")}
    collected = Operator("sum", "aten.stack.default", (tuple(Ref(op.outputs[0]) for op in ends),), (), ("sum",), "/sum")
    assert fold(replace(graph, operators=(*graph.operators, collected), tensors=tensors)) is None
