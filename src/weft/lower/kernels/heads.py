"""Keys and values of fewer heads than there are ranks. In: all their heads. Out: those that this rank's queries read."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_heads(x: Tensor, first: int, count: int, of: int) -> Tensor:
    """Of keys or values [..., heads, positions, width], those that queries' heads `first` to `first + count` of `of` read: as few as there
    are where as many queries read each, else one for every query."""
    each = of // x.shape[-3]
    heads = [(first + i) // each for i in range(count)]
    number = heads[-1] + 1 - heads[0]
    if heads == [heads[0] + i * number // count for i in range(count)]:
        return x.narrow(-3, heads[0], number)
    return x.index_select(-3, torch.tensor(heads, device=x.device))
