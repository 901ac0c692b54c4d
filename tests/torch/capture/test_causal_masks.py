"""Masks that hide what comes later are seen to do so, and ranks that share a sequence then have as much to do each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.lower.kernels import ring as rings
from shardwise.lower.kernels.ring import Ring
from shardwise.model.dims.sequence_dims import can_use_zigzag, find_sequence_dims
from shardwise.plan.ir.placement import even_shard_ranges, zigzag_ranges
from shardwise.run.rank_model.model_source import ModelSource

Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


def _least(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)


def _triangle(keys: Tensor, queries: Tensor, real: Tensor) -> Tensor:
    return torch.ones(keys.shape[-1], keys.shape[-1], dtype=torch.bool).tril() & real


MASKS: dict[str, tuple[Mask, bool]] = {
    "causal and padding": (lambda keys, queries, real: (keys <= queries) & real, True),
    "the other way round": (lambda keys, queries, real: real & (queries + 0 >= keys), True),
    "numbers that are added": (lambda keys, queries, real: _least(~((keys <= queries) & real)), True),
    "what comes later is hidden": (lambda keys, queries, real: _least(keys > queries), True),
    "a triangle": (_triangle, True),
    "a window": (lambda keys, queries, real: (keys <= queries) & (keys > queries - 3), False),
    "padding": (lambda keys, queries, real: real & (keys >= 0), False),
    "what comes before is hidden": (lambda keys, queries, real: keys >= queries, False),
}


class Masked(nn.Module):
    """Attention with a mask that is made of positions and of which tokens are there, [samples, positions]."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.project, self.mask = nn.Linear(8, 24), mask

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        mask = self.mask(at.view(1, 1, 1, -1), at.view(1, 1, -1, 1), there[:, None, None, :])
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, mask).square().mean()


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_hides_what_comes_later_is_seen(name: str) -> None:
    mask, is_causal = MASKS[name]
    batch = torch.randn(2, 12, 8), torch.ones(2, 12, dtype=torch.bool)
    graph = ModelSource.from_model(lambda: Masked(mask)).capture(batch, None, 2).graph
    assert can_use_zigzag(graph, graph.rules, find_sequence_dims(graph, graph.rules)) is is_causal


def _scores(at: Any, mask: Tensor) -> list[int]:
    """What each rank computes in a ring: parts of queries and keys in which anything is seen."""
    ring = Ring(None, at, at, causal=False)
    parts = [[part for owner in mine for part in owner] for mine in ring.tiles]
    starts = [[range(a, b) for a, b in mine] for mine in at]
    rows = [torch.tensor([i for one in mine for i in one]) for mine in starts]
    return [
        sum(part.rows * part.columns for part in mine if rings._is_visible(rings._mask_of_tile(part, mask[..., of, :])).any())
        for mine, of in zip(parts, rows, strict=True)
    ]


def test_causal_attention_with_padding_is_as_much_work_for_every_rank() -> None:
    """Of 64 positions on 4 ranks with padding in front or behind: within one block of 8 by 8 of one another; in plain order the last has
    four times as much as the first."""
    at = torch.arange(64)
    for padding in (at < torch.tensor([[[[64]]], [[[53]]]]), at >= torch.tensor([[[[0]]], [[[11]]]])):
        mask = (at <= at.unsqueeze(-1)) & padding
        balanced = _scores(zigzag_ranges(64, 4), mask)
        assert max(balanced) - min(balanced) <= 8 * 8
        in_order = _scores(tuple((one,) for one in even_shard_ranges(64, 4)), mask)
        assert in_order == [256, 512, 768, 1024]
