"""A model for plain loops, its batches, and how parts are told from wrong ones; of `test_plain` and `test_cut_weights`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan

# By columns and rows; the table by vocabulary, so that the logits are made in pieces and the user's loss still sees them whole.
CUT = (("up.weight", 0), ("up.bias", 0), ("down.weight", 1), ("emb.weight", 0))
BATCH, STEPS = 8, 3


class Mixed(nn.Module):
    """Tied embedding, batch norm, a layer that is never called, a column-row pair that tensor parallelism can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h.transpose(1, 2)).transpose(1, 2))))
        return self.head(h)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(16, (BATCH, 6), generator=generator) for _ in range(2)) for _ in range(STEPS)]  # type: ignore[misc]


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


def matches(local: Tensor, want: Tensor) -> bool:
    """Whether `local` is the whole, or one of its equal pieces along some dimension."""
    if local.shape == want.shape:
        return torch.allclose(local, want, rtol=1e-9, atol=1e-11)
    for dim in range(want.dim()):
        if local.shape[:dim] == want.shape[:dim] and local.shape[dim + 1 :] == want.shape[dim + 1 :]:
            count = want.shape[dim] // local.shape[dim]
            return any(torch.allclose(local, piece, rtol=1e-9, atol=1e-11) for piece in want.chunk(count, dim))
    return False


def plan_of(layout: str) -> Plan:
    sizes = Layout.parse(f"{layout} precision=float64")
    return Plan(sizes, "Mixed", "1xcpu-2", BATCH, shards=(("tensor", CUT),) if sizes.tensor > 1 else ())


def said(call: Callable[[], Any], *kinds: type[Exception]) -> str:
    """What a call is refused with; empty where it is not."""
    try:
        call()
    except kinds as error:
        return str(error)
    return ""
