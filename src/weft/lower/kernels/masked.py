"""`x.masked_scatter(mask, source)` of samples that are cut: a rank's places take what lies in the source behind what earlier ranks take.

In: this rank's samples of x and mask, and the whole source. Out: this rank's samples. The source gets this rank's summand of its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.world.world import Group


def masked_scatter(group: Group, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """`x_N...` and `mask_N...` (which may broadcast to x behind its samples) are cut over `group`, in order; `source` is whole."""
    places = mask.expand_as(x)
    counts = group.all_gather(places.sum().reshape(1), 0)
    before = counts[: group.index].sum()
    flat = source.reshape(-1)
    taken = (torch.arange(x.numel(), device=x.device) + before).clamp(max=flat.numel() - 1)
    return x.masked_scatter(places, flat[taken])
