"""Operators whose dimensions an argument tells, not their shapes: each way that a rule offers, in 2 and 3 parts, is the operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pieces import Case, case, check, choices
from torch import Tensor

from weft.model.rules import rule_of


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def cell(name: str, gates: int, states: int) -> Case:
    held = [real(6, 2) for _ in range(states)]
    weights = (real(gates * 2, 4), real(gates * 2, 2), real(gates * 2), real(gates * 2))
    return case(f"{name}.default", real(6, 4), held if states == 2 else held[0], *weights)


# (name, the call, labels that are offered over 2 ranks)
CASES: list[tuple[str, Callable[[], Case], set[str]]] = [
    ("layer norm over two dimensions", lambda: case("layer_norm.default", real(6, 4, 6), [4, 6]), {"b-1"}),
    ("layer norm over all", lambda: case("layer_norm.default", real(4, 6), [4, 6]), set()),
    ("layer norm with weights", lambda: case("layer_norm.default", real(6, 4, 6), [4, 6], real(4, 6), real(4, 6)), {"b-1"}),
    ("RMS norm over two dimensions", lambda: case("rms_norm.default", real(2, 6, 4, 6), [4, 6]), {"b-2", "b-1"}),
    ("renorm of rows", lambda: case("renorm.default", real(6, 4), 2, 0, 1.0), {"d"}),
    ("renorm of columns", lambda: case("renorm.default", real(6, 4), 1, -1, 0.5), {"d"}),
    ("a product with dots", lambda: case("einsum.default", "...i,ij->...j", [real(2, 6, 4), real(4, 6)]), {"A", "B", "i", "j"}),
    ("dots that broadcast", lambda: case("einsum.default", "b...,...->b...", [real(6, 1, 4), real(2, 4)]), {"A", "B", "b"}),
    ("a result that is left out", lambda: case("einsum.default", "bi,ij", [real(6, 4), real(4, 2)]), {"b", "i", "j"}),
    ("a matrix and a vector", lambda: case("matmul.default", real(2, 6, 4), real(4)), {"b0", "n", "k"}),
    ("a vector and matrices", lambda: case("matmul.default", real(4), real(2, 4, 6)), {"b0", "m", "k"}),
    ("two vectors", lambda: case("matmul.default", real(6), real(6)), {"k"}),
    ("tensors made alike", lambda: case("broadcast_tensors.default", [real(6, 1, 4), real(2, 4), real(4)]), {"d0", "d1", "d2"}),
    ("LSTM cell", lambda: cell("lstm_cell", 4, 2), {"b"}),
    ("GRU cell", lambda: cell("gru_cell", 3, 1), {"b"}),
    ("RNN cell", lambda: cell("rnn_tanh_cell", 1, 1), {"b"}),
    ("BCE, summed", lambda: case("binary_cross_entropy_with_logits.default", real(6, 4), real(6, 4), None, None, 2), {"d0", "d1"}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "labels"), [(m, x) for _, m, x in CASES], ids=[name for name, *_ in CASES])
def test_cut_by_any_label_it_is_the_operator(make: Callable[[], Case], labels: set[str]) -> None:
    torch.manual_seed(0)
    made = make()
    assert rule_of(made.op, made.graph.tensors) is not None
    assert {choice.label for choice in choices(made, 2)} == labels
    assert not check(made, (2, 3))
