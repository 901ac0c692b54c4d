"""Repeated layers once, against the propagation of the whole graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable
from shardwise.model.sharding.fold import fold_layers, propagate_with_folding
from shardwise.model.sharding.propagate import propagate as propagate_whole
from tests.support.gpt_graph import gpt


@pytest.mark.parametrize("layers", [5, 8, 12])
@pytest.mark.parametrize("sizes", [{"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 4}])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_expanded_sharding_is_the_whole_graphs(layers: int, sizes: dict[str, int], sequence: bool) -> None:
    graph = gpt(layers)
    folded = fold_layers(graph)
    assert folded is not None
    assert len(folded.small.operators) < len(graph.operators)
    assert propagate_with_folding(graph, sizes, sequence=sequence) == propagate_whole(graph, sizes, sequence=sequence)


def test_every_operator_has_one_of_its_kind_to_stand_for_it() -> None:
    graph = gpt(9)
    folded = fold_layers(graph)
    assert folded is not None
    (run,) = folded.runs
    assert run.count == 9
    for op, name in folded.stand_in_operator.items():
        assert op.rpartition("_")[0] == name.rpartition("_")[0]
    for value, other in folded.stand_in_value.items():
        assert graph.tensors[value] == graph.tensors[other]
    assert {v.value for v in folded.small.parameters} <= {v.value for v in graph.parameters}


def test_shards_that_are_given_are_kept() -> None:
    graph = gpt(6)
    found = propagate_whole(graph, {"tensor": 2})
    assert propagate_with_folding(graph, {"tensor": 2}, found.shards) == propagate_whole(graph, {"tensor": 2}, found.shards)
    odd = {"tensor": found.shards["tensor"][:-3]}  # equal layers cut differently
    assert propagate_with_folding(graph, {"tensor": 2}, odd) == propagate_whole(graph, {"tensor": 2}, odd)


def test_few_layers_and_layers_that_are_collected_stay_whole() -> None:
    assert fold_layers(gpt(3)) is None
    graph = gpt(8)
    ends = [op for op in graph.operators if op.target == "aten.gelu.default"]
    tensors = dict(graph.tensors) | {"sum": Tensor(graph.tensors[ends[0].outputs[0]].shape, "float32")}
    collected = Operator("sum", "aten.stack.default", (tuple(Ref(op.outputs[0]) for op in ends),), (), ("sum",), "/sum")
    assert fold_layers(replace(graph, operators=(*graph.operators, collected), tensors=tensors)) is None


def striped(layers: int) -> Graph:
    """Layers that add one of two inputs: every third layer another than the two before it."""
    tensor = Tensor((8, 4), "float32")
    names = ["x", "near", "far"]
    inputs = tuple(Variable(name, name, tensor, batched=True) for name in names)
    weights = tuple(Variable(f"w{i}", f"{i}.w", Tensor((4, 4), "float32")) for i in range(layers))
    operators, value = [], "x"
    for i in range(layers):
        mask = "far" if i % 3 == 2 else "near"
        operators.append(Operator(f"mm{i}", "aten.mm.default", (Ref(value), Ref(f"w{i}")), (), (f"a{i}",), f"{i}/mm"))
        operators.append(Operator(f"add{i}", "aten.add.Tensor", (Ref(f"a{i}"), Ref(mask)), (), (f"b{i}",), f"{i}/add"))
        value = f"b{i}"
    operators.append(Operator("sum", "aten.sum.default", (Ref(value),), (), ("loss",), "/sum"))
    made = {u: tensor for op in operators for u in op.outputs} | {"loss": Tensor((), "float32")}
    tensors = {v.value: v.tensor for v in (*inputs, *weights)} | made
    return Graph(weights, (), inputs, (), tuple(operators), tensors, "loss", 8)


def test_layers_of_two_kinds_in_turn_are_one_period() -> None:
    """Alike by kind they are one by one, but what they read repeats every third only."""
    graph = striped(30)
    folded = fold_layers(graph)
    assert folded is not None
    (run,) = folded.runs
    assert run.period == 6
    assert run.count >= 9
    for sizes in ({"data": 2}, {"tensor": 2}):
        assert propagate_with_folding(graph, sizes) == propagate_whole(graph, sizes)


def test_too_few_stripes_stay_whole() -> None:
    """Nine layers in turn of three are too few to fold by threes, and no five in a row are alike."""
    assert fold_layers(striped(9)) is None
