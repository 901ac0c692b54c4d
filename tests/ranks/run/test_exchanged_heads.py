"""Heads exchanged inside of a ring, beside torch's attention on one rank in float64; whole models; what travels; broken twins."""

from __future__ import annotations

import re

import pytest
import test_context_layouts as layouts
import test_ring_attention as rings
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from shardwise.errors import LayoutError
from shardwise.lower.kernels import ulysses_ring
from shardwise.lower.kernels.ring import Ring
from shardwise.lower.kernels.ulysses_ring import head_exchange_of, ulysses_ring_attention
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sharding import num_exchanging_ranks as ranks_exchanging
from shardwise.model.sharding.sharding import ring_operands
from shardwise.plan.layout import Layout
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.solve.axis_candidates import min_heads
from shardwise.solve.constraints import parse_constraints
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

NAMES = (
    "causal", "causal over fewer keys", "causal, one head of keys", "padding, grouped heads", "bias that learns", "bias of all rows",
    "blind rows", "crosswise", "dropout, causal",
)  # fmt: skip


def _difference(name: str, world: World) -> float:
    """As `difference` of a ring, of 4 ranks of which 2 exchange heads."""
    case, group = rings.CASES[name], world.world_group
    beside, apart = world.group(group.ranks[:2] if group.index < 2 else group.ranks[2:]), world.group(group.ranks[group.index % 2 :: 2])

    def attention(ring: Ring, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        by_row = case.mask is not None and case.mask(case.queries, case.keys).shape[-2] > 1
        return ulysses_ring_attention(head_exchange_of(beside, apart, ring, by_row), q, k, v, mask)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rings, "ring_attention", attention)
        return rings.difference(case, world)


def _as_they_came(members: list[Tensor], at: object) -> Tensor:
    return ulysses_ring.torch.cat(members, -2)


def _all(world: World) -> dict[str, float]:
    found = {name: _difference(name, world) for name in NAMES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ulysses_ring, "_sort_positions", _as_they_came)
        found["twin"] = _difference("causal", world)
    return found


def test_it_equals_attention_on_one_rank() -> None:
    """Every kind of mask and of heads; a twin that takes positions as they came differs."""
    for found in launch(_all, 4, show=False):
        assert found.pop("twin") > 1e-3
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "context=8 attention=ulysses+ring"),  # of 4 heads
        ("t5", "context=4 zero=3 attention=ulysses:2+ring"),
        ("gpt2", "context=4 attention=ulysses:2+ring microbatches=2 recompute=selective"),
        ("llama", "tensor=2 context=4 attention=ulysses+ring"),  # of 4 heads 2 a rank
    ],
)
def test_a_layout_with_both_equals_serial(name: str, layout: str) -> None:
    found = layouts.verified(name, layout, cut_everything="tensor" in layout)
    assert found.ok, found
    assert found.tolerance == 1e-9
    assert found.divided["context"]["flops"] > 0.999


def test_more_ranks_than_heads_are_refused_by_name() -> None:
    model = resolve("gpt-tiny")  # of 8 heads
    with pytest.raises(LayoutError, match=r"among 16 ranks, and a rank has 8 heads of .*; use attention=ulysses\+ring, which"):
        shardwise.plan(model.make, model.batch(8), loss=model.loss, cluster="2xdgx-h100", layout="context=16 attention=ulysses:16+ring")


def test_a_layout_with_both_prints_and_parses() -> None:
    for word in ("ulysses+ring", "ulysses:2+ring"):
        layout = Layout.parse(f"context=4 attention={word}")
        assert str(layout) == f"data=1 tensor=1 pipeline=1 context=4 attention={word}"
    assert Layout.parse("context=4 attention=ulysses:1+ring") == Layout.parse("context=4 attention=ring")
    with pytest.raises(LayoutError, match=r"attention=ulysses:3\+ring exchanges heads among ranks of context=4; use a number that divides"):
        Layout.parse("context=4 attention=ulysses:3+ring")


@pytest.mark.parametrize("word", ["ring:7", "ulysses:2", "gather:2", "auto:2", "ulysses:2+ring:2"])
def test_a_count_that_says_nothing_is_refused(word: str) -> None:
    """It would be of no consequence."""
    with pytest.raises(LayoutError, match=f"attention={re.escape(word)} is unknown"):
        Layout.parse(f"context=4 attention={word}")


def test_a_constraint_says_how_many_exchange_heads() -> None:
    asked, barred = (parse_constraints(f"attention{relation}ulysses:2+ring")[0] for relation in ("=", "!="))
    assert (str(asked), str(barred)) == ("attention=ulysses:2+ring", "attention!=ulysses:2+ring")
    assert asked.admits("ulysses:2+ring")
    assert not asked.admits("ulysses:4+ring")
    assert barred.admits("ring")


class _Headless(nn.Module):
    """Attention over [samples, positions, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.product = nn.Embedding(8, 16), nn.Linear(16, 48)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.product(self.table(ids)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


def test_attention_without_heads_has_none_to_exchange() -> None:
    """Neither its features nor its samples pass for heads: keys go round all ranks."""
    batch = {"ids": torch.zeros(2, 16, dtype=torch.long)}
    graph = ModelSource.from_model(_Headless).capture(batch, lambda out, batch: out.sum(), 2).graph
    assert min_heads(graph) == 1
    sharding = propagate(graph, {"context": 4}, attention="ulysses+ring")
    ways = [
        ranks_exchanging(sharding, op, graph.rules[op.name], "context", graph.tensors[op.inputs[0]].shape)
        for op in graph.operators
        if op.inputs and ring_operands(sharding, op, graph.rules[op.name], "context")
    ]
    assert ways == [1]
