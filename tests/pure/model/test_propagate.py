"""Which cuts the search finds: Megatron's on a GPT, the cheapest of all on small graphs, and what a person says."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.model.graph import Graph, Operator, Ref, Tensor, Variable
from shardwise.model.sharding.axis_problem import AxisProblem
from shardwise.model.sharding.axis_search import apply_strategy, solve_axis
from shardwise.model.sharding.axis_values import FixedShards, OtherAxes
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import Prices, Sharding, redistribution_collectives
from shardwise.plan.ir.placement import D, P, R, Shard, is_shard
from tests.support.gpt_graph import gpt

LAYERS = 3
# A GPU beside another: faster links make it cut the sequence between the layers as well, as Megatron's later version does.
GPU = Prices(flops_per_s=5e13, memory_bytes_per_s=1.5e12, link_bytes_per_s=1e11, latency_s=2e-5)


@pytest.fixture(scope="module")
def megatron() -> tuple[Graph, Sharding]:
    graph = gpt(layers=LAYERS, hidden=1024, heads=16, sequence=512, vocabulary=51200, batch=8)
    return graph, propagate(graph, {"tensor": 2}, prices=GPU)


def test_weights_are_cut_as_in_megatron(megatron: tuple[Graph, Sharding]) -> None:
    cut = dict(megatron[1].shards["tensor"])
    for i in range(LAYERS):
        for name in ("q", "k", "v", "up"):
            assert cut[f"h.{i}.{name}.weight"] == 0, "by columns: output features"
            assert cut[f"h.{i}.{name}.bias"] == 0
        for name in ("proj", "down"):
            assert cut[f"h.{i}.{name}.weight"] == 1, "by rows: input features"
            assert f"h.{i}.{name}.bias" not in cut
        assert not {name for name in cut if f"h.{i}.ln" in name}
    assert cut["head.weight"] == 0, "by vocabulary"
    assert "emb.weight" in cut


def test_attention_is_cut_by_heads_and_the_loss_by_vocabulary(megatron: tuple[Graph, Sharding]) -> None:
    graph, sharding = megatron
    labels = {op.name: sharding.labels[op.name]["tensor"] for op in graph.operators}
    assert {labels[op.name] for op in graph.operators if "attention" in op.target} == {"h"}
    assert {labels[op.name] for op in graph.operators if "cross_entropy" in op.target} == {"c"}


def test_a_layer_moves_twice_forward_and_twice_backward(megatron: tuple[Graph, Sharding]) -> None:
    graph, sharding = megatron
    reduced = [op for op in graph.operators if op.target == "aten.linear.default" and sharding.labels[op.name]["tensor"] == "i"]
    assert len(reduced) == 2 * LAYERS, "each sums over ranks before its bias is added: two all-reduces forward a layer"
    inside = [m for m in sharding.redistributions if m.value not in graph.operators[0].outputs]
    assert {(m.forward, m.backward) for m in inside} == {("", "all_reduce")}
    # Before q, k and v, before up, and once before the head; what precedes the first layer is the look-up's own.
    assert len(inside) == 2 * LAYERS


def test_gradients_are_summed_over_data_and_of_cut_weights_over_nothing_else(megatron: tuple[Graph, Sharding]) -> None:
    graph = megatron[0]
    both = propagate(graph, {"data": 2, "tensor": 2}, prices=GPU)
    cut = dict(both.shards["tensor"])
    for p in graph.parameters:
        summed = both.gradient_axes[p.value]
        assert summed == ("data",) if p.name in cut else "data" in summed
    assert not [m for m in both.redistributions if m.axis == "data" and m.forward not in ("", "slice")], "data needs nothing forward"


def test_data_cuts_no_parameter_and_every_operator() -> None:
    graph = gpt(layers=1)
    sharding = propagate(graph, {"data": 4})
    assert sharding.shards["data"] == ()
    assert all(sharding.labels[op.name]["data"] for op in graph.operators)
    assert sharding.replicated_sites == ()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("batch", [2, 64])
def test_samples_are_never_cut_over_tensor(batch: int, sequence: bool) -> None:
    """However large the batch against the weights: that would be data parallelism, with every weight whole on every rank."""
    graph = gpt(layers=2, hidden=64, heads=4, sequence=16, vocabulary=128, batch=batch)
    sharding = propagate(graph, {"tensor": 2}, sequence=sequence)
    cut = dict(sharding.shards["tensor"])
    assert not [v.name for v in graph.parameters if "h." in v.name and len(v.tensor.shape) > 1 and v.name not in cut]
    followed = propagate(graph, {"data": 2})
    for value, forms in followed.placements.items():
        if is_shard(forms["data"]):
            assert sharding.placements[value]["tensor"] != forms["data"], value


def test_sequence_parallelism_replaces_each_all_reduce_by_a_reduce_scatter_and_an_all_gather() -> None:
    """Korthikanti et al. 2022, section 4.2.2: the same bytes, and what lies between the products is cut by positions."""
    graph = gpt(layers=LAYERS, hidden=1024, heads=16, sequence=512, vocabulary=51200, batch=8)
    sharding = propagate(graph, {"tensor": 4}, prices=GPU, sequence=True)
    of_layers = [m for m in sharding.redistributions if m.op.startswith(("q", "up", "add", "drop")) or m.source is P]
    scattered = [m for m in of_layers if (m.forward, m.backward) == ("reduce_scatter", "all_gather")]
    gathered = [
        m for m in sharding.redistributions if (m.source, m.target, m.forward, m.backward) == (Shard(1), D, "all_gather", "reduce_scatter")
    ]
    assert len(scattered) >= 2 * LAYERS
    assert len(gathered) >= 2 * LAYERS
    assert "all_reduce" not in {m.forward for m in sharding.redistributions if m.value not in graph.operators[0].outputs}
    norms = [op for op in graph.operators if "layer_norm" in op.target]
    assert {sharding.placements[op.outputs[0]]["tensor"] for op in norms[1:]} == {Shard(1)}
    assert dict(sharding.shards["tensor"]) == dict(propagate(graph, {"tensor": 4}, prices=GPU).shards["tensor"])


def test_axes_of_size_one_are_left_out() -> None:
    assert propagate(gpt(layers=1), {"data": 1, "tensor": 1}).sizes == {}


def test_shards_by_hand_are_kept() -> None:
    graph = gpt(layers=1)
    wanted = (("h.0.up.weight", 0), ("h.0.up.bias", 0), ("h.0.down.weight", 1))
    sharding = propagate(graph, {"tensor": 2}, {"tensor": wanted})
    assert set(sharding.shards["tensor"]) == set(wanted)
    by_site = {op.site.split("/")[0]: sharding.labels[op.name]["tensor"] for op in graph.operators if op.target == "aten.linear.default"}
    assert by_site["h.0.up"] == "o"
    assert by_site["h.0.down"] == "i"
    other = propagate(graph, {"tensor": 2}, {"tensor": (("h.0.proj.weight", 0),)})
    assert other.shards["tensor"] == (("h.0.proj.weight", 0),)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("h.9.up.weight", 0), "cuts h.9.up.weight over tensor, but the model has no such"),
        (("h.0.up.weight", 2), r"cuts dimension 2 of h.0.up.weight \[256, 64\] over tensor=3"),
    ],
)
def test_wrong_shards_are_refused_with_numbers(entry: tuple[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        propagate(gpt(layers=1), {"tensor": 3}, {"tensor": (entry,)})


def test_what_cannot_be_moved_is_said() -> None:
    with pytest.raises(LayoutError, match="no redistribution from \\+ to R"):
        redistribution_collectives(D, R)


def small(shapes: list[tuple[str, int, int]]) -> Graph:
    """A few operators on x [8, 8] with weights [8, 8]; operands are chosen by number among what has been made."""
    tensors = {"x": Tensor((8, 8), "float32")}
    parameters: list[Variable] = []
    operators: list[Operator] = []
    made = ["x"]
    for kind, a, b in shapes:
        left, right = made[a % len(made)], made[b % len(made)]
        name = f"y{len(operators)}"
        tensors[name] = Tensor((8, 8), "float32")
        if kind == "linear":
            weight = f"w{len(parameters)}"
            tensors[weight] = Tensor((8, 8), "float32")
            parameters.append(Variable(weight, weight, tensors[weight], trainable=True))
            target, args = "aten.linear.default", (Ref(left), Ref(weight))
        elif kind == "add":
            target, args = "aten.add.Tensor", (Ref(left), Ref(right))
        elif kind == "mm":
            target, args = "aten.mm.default", (Ref(left), Ref(right))
        elif kind == "t":
            target, args = "aten.t.default", (Ref(left),)
        else:
            target, args = "aten.softmax.int", (Ref(left), -1)
        operators.append(Operator(name, target, args, (), (name,), name))
        made.append(name)
    tensors["loss"] = Tensor((), "float32")
    operators.append(Operator("loss", "aten.sum.default", (Ref(made[-1]),), (), ("loss",), "loss"))
    x = Variable("x", "x", tensors["x"], batched=True)
    return Graph(tuple(parameters), (), (x,), (), tuple(operators), tensors, "loss", 8)


def exhaustive(problem: AxisProblem, graph: Graph) -> float:
    """The least cost over every combination of choices, applied one after the other."""
    best = float("inf")
    for combination in product(*(problem.strategies(op) for op in graph.operators)):
        cost, held = 0.0, {}
        for op, choice in zip(graph.operators, combination, strict=True):
            if not problem.is_worthwhile(op, choice, held):
                break
            tried = apply_strategy(problem, op, choice, cost, held)
            if tried is None:
                break
            cost, held, _ = tried
            held.update({v: (form,) for v, form in zip(op.outputs, choice.output_placements, strict=True)})
        else:
            best = min(best, cost)
    return best


def found_cost(problem: AxisProblem, graph: Graph, beam: int) -> float:
    chosen, _ = solve_axis(problem, beam)
    cost, held = 0.0, {}
    for op in graph.operators:
        tried = apply_strategy(problem, op, chosen[op.name], cost, held)
        assert tried is not None
        cost, held, _ = tried
        held.update({v: (form,) for v, form in zip(op.outputs, chosen[op.name].output_placements, strict=True)})
    return cost


KINDS = st.sampled_from(("linear", "linear", "add", "mm", "t", "softmax"))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(KINDS, st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4),
    st.sampled_from((1e8, 1e10, 1e13)),
    st.sampled_from(("tensor", "data")),
)
def test_the_beam_finds_what_enumeration_finds(shapes: list[tuple[str, int, int]], link: float, axis: str) -> None:
    graph = small(shapes)
    prices = Prices(flops_per_s=1e8, memory_bytes_per_s=1e10, link_bytes_per_s=link, latency_s=1e-9)
    problem = AxisProblem(graph, axis, 2, prices, FixedShards({} if axis == "data" else None), OtherAxes())
    assert found_cost(problem, graph, 1000) == pytest.approx(exhaustive(problem, graph), rel=1e-12)


def test_a_beam_of_one_is_told_from_enumeration() -> None:
    """The broken twin: a greedy search does not pass the property above."""
    prices = Prices(flops_per_s=1e8, memory_bytes_per_s=1e10, link_bytes_per_s=1e9, latency_s=1e-9)
    worse = 0
    for kinds in product(("linear", "mm", "softmax"), repeat=3):
        graph = small([(kind, i, i - 1) for i, kind in enumerate(kinds)])
        problem = AxisProblem(graph, "tensor", 2, prices, FixedShards(), OtherAxes())
        worse += found_cost(problem, graph, 1) > exhaustive(problem, graph) * (1 + 1e-9)
    assert worse


def test_an_average_of_weights_does_not_keep_their_gradients_from_being_summed_once_a_step() -> None:
    """A target that follows a trained weight reads it whole, where a product reads it with summands of its gradient."""
    weight, target = Variable("w", "w", Tensor((4, 4), "float32"), (), True), Variable("t", "t", Tensor((4, 4), "float32"), (), False)
    x = Variable("x", "0", Tensor((8, 4), "float32"), batched=True)
    tensors = {v.value: v.tensor for v in (weight, target, x)}
    tensors |= dict.fromkeys(("part", "moved"), tensors["w"]) | dict.fromkeys(("y", "z"), tensors["x"]) | {"loss": Tensor((), "float32")}
    operators = (
        Operator("y", "aten.mm.default", (Ref("x"), Ref("w")), (), ("y",), "y"),
        Operator("part", "aten.mul.Tensor", (Ref("w"), 0.1), (), ("part",), "part"),
        Operator("moved", "aten.add_.Tensor", (Ref("t"), Ref("part")), (), ("moved",), "moved"),
        Operator("z", "aten.mul.Tensor", (Ref("y"), Ref("y")), (), ("z",), "z"),
        Operator("loss", "aten.mean.default", (Ref("z"),), (), ("loss",), "loss"),
    )
    found = propagate(Graph((weight, target), (), (x,), (), operators, tensors, "loss", 8), {"data": 2})
    assert found.gradient_axes["w"] == ("data",)
    assert not found.redistributions
