"""Attention whose queries are cut: a rank has those of its positions, and all keys that they see.

In: torch's operator and the positions of this rank's queries, as ranges. Out: its result for these queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.plan.placement import Range


def seen(at: tuple[Range, ...], q: Tensor, k: Tensor) -> Tensor:
    """Which keys queries at these positions see where attention is causal: those up to their own. bool [queries, keys]."""
    mine = torch.cat([torch.arange(a, b, device=q.device) for a, b in at])
    return mine.unsqueeze(-1) >= torch.arange(k.shape[-2], device=q.device)


def causal(target: Callable[..., Tensor], at: tuple[Range, ...], q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
    """Causal attention of queries [..., queries, width] at these positions to whole keys. Keys that none sees are left out."""
    done, parts = 0, []
    for a, b in at:
        mine, count = q.narrow(-2, done, b - a), min(b, k.shape[-2])
        early = (x.narrow(-2, 0, count) for x in (k, v))
        if a == 0:
            parts.append(target(mine, *early, None, 0.0, True, **named))
        else:
            parts.append(target(mine, *early, seen(((a, b),), mine, k.narrow(-2, 0, count)), 0.0, False, **named))
        done += b - a
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
