"""Proofs of plans that give branches to ranks: rows of experts stay in their branch, and few samples are cut unequally beside positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.capture.experts import from_experts, of_experts, to_experts
from shardwise.errors import LayoutError
from shardwise.run.prove.proof import Proof

HIDDEN, EXPERTS = 4, 3


class SharedExpert(nn.Module):
    """Experts beside a layer that all tokens take; `is_gated`: experts have two products of the same rows, which are branches as well."""

    def __init__(self, is_gated: bool) -> None:
        super().__init__()
        self.gate, self.shared = nn.Linear(HIDDEN, EXPERTS), None if is_gated else nn.Linear(HIDDEN, HIDDEN)
        self.up, self.beside, self.down = (nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, which = self.gate(x).softmax(-1).topk(2, -1)
        rows, experts, order = to_experts(x, which, EXPERTS)
        inner = of_experts(rows, experts, self.up, None, False).tanh()
        if self.shared is None:
            inner = inner * of_experts(rows, experts, self.beside, None, False)
        out = from_experts(of_experts(inner, experts, self.down, None, False), order, weight.type_as(x), EXPERTS)
        return functional.mse_loss(out if self.shared is None else out + self.shared(x), y)


class FlatPositions(nn.Module):
    """Attention, and two layers side by side on rows of all samples' positions."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.places = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Parameter(torch.randn(5, HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = functional.scaled_dot_product_attention(x + self.places, x, x)
        rows = x.flatten(0, 1)
        mixed = (self.left(rows).tanh() + self.right(rows)).view_as(x)
        weight = functional.dropout(mixed, 0.5).flatten(0, 1).softmax(-1)
        return functional.mse_loss(weight.view_as(x), y)


def prove_layout(make: Any, layout: str, shape: tuple[int, ...]) -> Proof:
    batch = (torch.randn(shape), torch.randn(shape))
    proof = shardwise.prove(make, layout, batch, max_error_probability=0.1)
    assert isinstance(proof, Proof)
    return proof


def test_a_branch_has_experts_from_dispatch_to_combination() -> None:
    assert prove_layout(lambda: SharedExpert(False), "branch=2", (6, HIDDEN)).ok


def test_rows_of_experts_are_not_cut_by_samples_between_branches() -> None:
    with pytest.raises(LayoutError, match="in the order of experts"):
        prove_layout(lambda: SharedExpert(True), "branch=2", (6, HIDDEN))


@pytest.mark.parametrize("attention", ["ring", "gather"])
def test_samples_are_cut_unequally_where_positions_are_cut_too(attention: str) -> None:
    assert prove_layout(FlatPositions, f"context=2 branch=3 attention={attention}", (4, 5, HIDDEN)).ok
