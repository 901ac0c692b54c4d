"""Grouped-query attention with fewer key heads than ranks: select the heads of keys and values that this rank's queries read."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_heads(x: Tensor, first: int, count: int, num_query_heads: int) -> Tensor:
    """Return, of keys or values [..., heads, positions, width], those that query heads `first` to `first + count` of `of` read: each once
    where equally many queries read it, else one per query head."""
    group_size = num_query_heads // x.shape[-3]
    heads = [(first + i) // group_size for i in range(count)]
    num_heads = heads[-1] + 1 - heads[0]
    if heads == [heads[0] + i * num_heads // count for i in range(count)]:
        return x.narrow(-3, heads[0], num_heads)
    return x.index_select(-3, torch.tensor(heads, device=x.device))
