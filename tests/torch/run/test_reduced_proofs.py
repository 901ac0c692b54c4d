"""Proofs of reduced plans against those of the whole ones, on random small graphs, right and with one fault."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwise
from shardwise.api_prove import _choose_ranks_per_axis
from shardwise.errors import UsageError
from shardwise.plan import reduced_layout
from shardwise.run.prove import rank_threads
from shardwise.run.prove.proof import Proof

ADD_UP, JOIN_FLAT = rank_threads.add_up, rank_threads.join_flat


class RandomGraph(nn.Module):
    """Layers of width 8 or 16 that a seed chooses: products, norms, functions, attention, and sums with earlier values."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.choices = random.Random(seed).choices(("linear", "norm", "gelu", "attention", "skip", "gate"), k=3)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)]) for _ in self.choices)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        first = x
        for choice, (up, down, norm) in zip(self.choices, self.layers, strict=True):
            if choice == "linear":
                x = down(functional.gelu(up(x)))
            elif choice == "norm":
                x = norm(x)
            elif choice == "gelu":
                x = functional.gelu(x) + x
            elif choice == "attention":
                q = x.unflatten(-1, (4, 2)).transpose(1, 2)
                x = x + functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(2)
            elif choice == "skip":
                x = down(up(x)) + first
            else:
                x = down(up(x) * torch.sigmoid(up(first)))
        return functional.mse_loss(down(up(x)), target)


def leave_out_the_last(parts: Sequence[Tensor]) -> Tensor:
    return ADD_UP(parts[:-1] if parts[0].is_floating_point() and parts[0].numel() > 1 else parts)


def rotate_members(parts: Sequence[Tensor]) -> Tensor:
    return JOIN_FLAT([*parts[1:], parts[0]] if parts[0].is_floating_point() else parts)


def leave_out_the_third(parts: Sequence[Tensor]) -> Tensor:
    """Leave out the members that neither of two ranks is."""
    return ADD_UP(parts[:2] if parts[0].is_floating_point() and parts[0].numel() > 1 else parts)


FAULTS: dict[str, tuple[str, Callable[[Sequence[Tensor]], Tensor]]] = {
    "a member left out": ("add_up", leave_out_the_last),
    "members rotated": ("join_flat", rotate_members),
    "the third member left out": ("add_up", leave_out_the_third),
}


def prove_graph(seed: int, layout: str, **options: Any) -> Proof:
    batch = tuple(torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    proof = shardwise.prove(lambda: RandomGraph(seed), layout, batch, max_error_probability=0.1, **options)
    assert isinstance(proof, Proof)
    return proof


@pytest.mark.parametrize(
    ("seed", "layout", "fault"),
    [
        (0, "data=3 zero=1", None),
        (1, "tensor=4 sequence_parallel=on", None),
        (2, "pipeline=3 microbatches=4", None),
        (3, "tensor=4", "a member left out"),
        (4, "data=4 zero=3", "members rotated"),
    ],
)
def test_reduced_proofs_agree_with_whole_ones(seed: int, layout: str, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault is not None:
        monkeypatch.setattr(rank_threads, *FAULTS[fault])
    reduced = prove_graph(seed, layout, ranks_per_axis=2)
    assert reduced.reduction
    assert reduced.ok == (fault is None) == prove_graph(seed, layout, whole=True).ok


def test_what_only_a_third_rank_shows_takes_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_threads, *FAULTS["the third member left out"])
    assert [prove_graph(3, "data=4", ranks_per_axis=ranks).ok for ranks in (2, 3)] == [True, False]


def test_a_wrong_reduction_hides_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_threads, *FAULTS["a member left out"])
    proofs = [prove_graph(3, "data=4", whole=True), prove_graph(3, "data=4", ranks_per_axis=2)]
    monkeypatch.setattr(reduced_layout, "reduce_size", lambda size, smallest=2: 1)
    proofs.append(prove_graph(3, "data=4", ranks_per_axis=2))
    assert [proof.ok for proof in proofs] == [False, False, True]


def test_what_is_too_large_is_reduced_unless_the_whole_is_wanted() -> None:
    def choose(model: Any, layout: str, ranks: int = 0, whole: bool = False) -> int:
        return _choose_ranks_per_axis(model, layout, None, ranks, whole)

    assert choose("gpt-tiny", "data=16") == 0
    assert choose("gpt-tiny", "data=32") == 2
    assert choose("gpt-tiny", "data=32", whole=True) == 0
    assert choose("gpt-10m", "data=2") == 2
    assert choose(RandomGraph, "data=32") == 2
    assert choose(RandomGraph, "pipeline=2 inner=4x4/2x8 microbatches=2") == 0  # ranks unlike one another
    for ranks, whole in ((1, False), (2, True)):
        with pytest.raises(UsageError):
            choose("gpt-tiny", "data=2", ranks, whole)
