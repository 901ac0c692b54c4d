"""Whether all ranks were given the same batch, of which each then takes its part. In: a batch. Out: nothing, or an error by name."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError
from weft.model.nesting import leaves
from weft.world.world import World

MOST_BYTES = 1 << 20  # of a tensor that tells batches apart


def check_same(batch: Any, world: World) -> None:
    """Hold this rank's batch against rank 0's. A loader that shuffles by itself, or has a part for each rank, is found so.

    Raises:
        UsageError: they differ.
    """
    mine = digest(batch)
    if world.told(lambda: mine) != mine:
        raise UsageError(
            f"rank {world.rank} is given another batch than rank 0, and one batch is divided among all ranks: seed what shuffles alike on "
            "every rank (torch.manual_seed, or DataLoader's generator), and leave DistributedSampler out"
        )


def digest(batch: Any) -> str:
    """A number for a batch's tensors: their places, kinds and shapes, and up to 1 MiB of each.

    >>> import torch
    >>> digest((torch.zeros(2), torch.ones(2))) == digest((torch.ones(2), torch.zeros(2)))
    False
    """
    found = 0
    for path, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode(), found)
            some = leaf.detach().flatten()[: MOST_BYTES // max(1, leaf.element_size())].contiguous().cpu()
            found = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), found)
    return f"{found:08x}"
