"""Attention whose queries are cut: a rank has those of its positions, and all keys. In: those positions. Out: what they see."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.plan.placement import Range


def seen(at: tuple[Range, ...], q: Tensor, k: Tensor) -> Tensor:
    """Which keys queries at these positions see where attention is causal: those up to their own. bool [queries, keys]."""
    mine = torch.cat([torch.arange(a, b, device=q.device) for a, b in at])
    return mine.unsqueeze(-1) >= torch.arange(k.shape[-2], device=q.device)
