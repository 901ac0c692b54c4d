"""FLOPs, bytes and kept tensors against closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.model.gradients import differentiable_values
from shardwise.model.graph import Graph, Operator, Ref, Tensor
from shardwise.model.work import model_flops, operator_bytes, operator_flops, operator_work, storage_roots, values_following_batch
from tests.support.gpt_graph import gpt


def one(
    target: str, *shapes: tuple[int, ...], out: tuple[int, ...], args: tuple[object, ...] | None = None
) -> tuple[Operator, dict[str, Tensor]]:
    tensors = {f"v{i}": Tensor(shape, "float32") for i, shape in enumerate(shapes)} | {"out": Tensor(out, "float32")}
    given = tuple(Ref(f"v{i}") for i in range(len(shapes))) if args is None else args
    return Operator("op", target, given, (), ("out",), "/op"), tensors


@given(st.integers(1, 4), st.sampled_from([32, 64, 128]), st.sampled_from([16, 64]), st.integers(1, 5), st.sampled_from([100, 512]))
def test_gpt_matches_narayan(layers: int, hidden: int, sequence: int, batch: int, vocabulary: int) -> None:
    """Equation 3 of Narayan et al. 2021, with 72 in place of 96 since nothing is recomputed."""
    graph = gpt(layers, hidden, 4, sequence, vocabulary, batch)
    closed = 72 * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))
    assert model_flops(graph) == pytest.approx(closed, rel=1e-12)


def test_six_flops_a_parameter_and_token() -> None:
    graph = gpt(2, 64, 4, 8, 512, 4)
    matrices = sum(v.tensor.size for v in graph.parameters if len(v.tensor.shape) == 2 and v.name != "emb.weight")
    attention = 2 * 12 * 4 * 8 * 8 * 64  # layers x 12 B s² h
    assert model_flops(graph) == pytest.approx(6 * matrices * 4 * 8 + attention)


@pytest.mark.parametrize(
    ("target", "shapes", "out", "args", "flops"),
    [
        ("aten.linear.default", [(5, 7), (3, 7)], (5, 3), None, 2 * 5 * 7 * 3),
        ("aten.mm.default", [(5, 7), (7, 3)], (5, 3), None, 2 * 5 * 7 * 3),
        ("aten.addmm.default", [(3,), (5, 7), (7, 3)], (5, 3), None, 2 * 5 * 7 * 3),
        ("aten.bmm.default", [(2, 5, 7), (2, 7, 3)], (2, 5, 3), None, 2 * 2 * 5 * 7 * 3),
        ("aten.conv2d.default", [(2, 6, 8, 8), (4, 3, 3, 3)], (2, 4, 8, 8), None, 2 * (2 * 4 * 64) * (3 * 9)),
        ("aten.conv_transpose2d.input", [(2, 6, 4, 4), (6, 4, 2, 2)], (2, 4, 8, 8), None, 2 * (2 * 6 * 16) * (4 * 4)),
        ("aten.einsum.default", [(2, 3, 5), (2, 5, 4)], (2, 3, 4), ("bij,bjk->bik", (Ref("v0"), Ref("v1"))), 2 * 2 * 3 * 5 * 4),
        ("aten.scaled_dot_product_attention.default", [(2, 3, 7, 4), (2, 3, 9, 4), (2, 3, 9, 5)], (2, 3, 7, 5), None, 2 * 6 * 7 * 9 * 9),
        ("aten.lstm_cell.default", [(5, 6), (5, 8), (5, 8), (32, 6), (32, 8), (32,), (32,)], (5, 8), None, 2 * 5 * (32 * 6 + 32 * 8)),
        ("aten.gru_cell.default", [(5, 6), (5, 8), (24, 6), (24, 8)], (5, 8), None, 2 * 5 * (24 * 6 + 24 * 8)),
        ("aten.add.Tensor", [(5, 7), (5, 7)], (5, 7), None, 0),
        ("aten.layer_norm.default", [(5, 7), (7,)], (5, 7), None, 0),
    ],
)
def test_flops_of_each_product(
    target: str, shapes: list[tuple[int, ...]], out: tuple[int, ...], args: tuple[object, ...] | None, flops: float
) -> None:
    assert operator_flops(*one(target, *shapes, out=out, args=args)) == flops


def test_lstm_counts_every_weight_once_a_step() -> None:
    shapes = [(4, 10, 6), (1, 4, 8), (1, 4, 8), (32, 6), (32, 8), (32,), (32,)]
    op, tensors = one("aten.lstm.input", *shapes, out=(4, 10, 8))
    assert operator_flops(op, tensors) == 2 * 4 * 10 * (32 * 6 + 32 * 8)


def test_bytes_of_views_lookups_and_sums() -> None:
    assert operator_bytes(*one("aten.view.default", (4, 6), out=(24,))) == 0
    assert operator_bytes(*one("aten.add.Tensor", (4, 6), (4, 6), out=(4, 6))) == 3 * 96
    assert operator_bytes(*one("aten.embedding.default", (1000, 8), (3,), out=(3, 8))) == 2 * 96


def test_a_dropout_that_drops_nothing_is_a_view() -> None:
    op, tensors = one("aten.dropout.default", (4, 6), out=(4, 6), args=(Ref("v0"), 0.0, True))
    assert operator_bytes(op, tensors) == 0
    op, tensors = one("aten.dropout.default", (4, 6), out=(4, 6), args=(Ref("v0"), 0.1, True))
    assert operator_bytes(op, tensors) > 0


def test_backward_of_a_product_is_one_product_an_operand() -> None:
    graph = gpt(1)
    done = operator_work(graph)
    linears = [done[op.name] for op in graph.operators if op.target == "aten.linear.default"]
    assert all(w.backward_flops == 2 * w.flops for w in linears)


def test_a_layer_keeps_what_autograd_keeps() -> None:
    """34·s·B·h bytes at 2 bytes (Korthikanti 2022, equation 2) less dropout masks; here 4 bytes, fused attention, no dropout."""
    batch, sequence, hidden = 8, 32, 64
    graph = gpt(1, hidden, 4, sequence, 512, batch)
    done, root = operator_work(graph), storage_roots(graph)
    weights = {v.value for v in graph.variables}
    layer = [op for op in graph.operators if op.site.startswith("h.0")]
    kept = {root.get(v, v) for op in layer for v in done[op.name].saved} - weights
    size = sum(graph.tensors[v].size_bytes for v in kept)
    # two norm inputs, their outputs, q k v and the result of attention, gelu's input and output: 2 + 2 + 4 + 8 widths of h
    assert size == (2 + 2 + 4 + 8) * 4 * batch * sequence * hidden


def test_what_follows_from_inputs_and_parameters() -> None:
    graph = gpt(1)
    assert graph.loss in differentiable_values(graph)
    assert graph.loss in values_following_batch(graph)
    assert not {"x", "y"} & differentiable_values(graph)
    assert not {v.value for v in graph.parameters} & values_following_batch(graph)


def test_broken_twin_a_graph_without_products_has_no_flops() -> None:
    graph = gpt(1)
    elementwise = tuple(op for op in graph.operators if "linear" not in op.target and "attention" not in op.target)
    assert model_flops(Graph(graph.parameters, (), graph.inputs, (), elementwise, graph.tensors, graph.loss, 8)) == 0
