"""`x.masked_scatter(mask, source)` with sharded samples: a rank's elements come after those that earlier ranks take from the source.

Inputs are this rank's samples of x and mask, and the full source, which gets this rank's partial sum of its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.world.world import Group


def masked_scatter(group: Group, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return x with the mask's elements from `source`; `x_N...` and `mask_N...` (broadcastable) are sharded over `group` in rank order."""
    is_target = mask.expand_as(x)
    counts = group.all_gather(is_target.sum().reshape(1), 0)
    num_before = counts[: group.index].sum()
    flat = source.reshape(-1)
    indices = (torch.arange(x.numel(), device=x.device) + num_before).clamp(max=flat.numel() - 1)
    return x.masked_scatter(is_target, flat[indices])
