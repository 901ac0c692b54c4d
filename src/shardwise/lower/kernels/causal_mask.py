"""Causal mask for attention with sharded queries: a rank has the queries of its positions, and all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.plan.ir.placement import Range


def causal_mask_at(at: tuple[Range, ...], q: Tensor, k: Tensor) -> Tensor:
    """Return the causal mask of queries at these positions: keys up to their own. bool [queries, keys]."""
    positions = torch.cat([torch.arange(a, b, device=q.device) for a, b in at])
    return positions.unsqueeze(-1) >= torch.arange(k.shape[-2], device=q.device)
