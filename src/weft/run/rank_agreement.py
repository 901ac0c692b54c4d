"""Whether all ranks were given the same batch and the same model, of which each then takes its part; and random numbers that are alike.

In: a batch, a module. Out: nothing, or an error by name.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.fakes import Fake
from weft.capture.nesting import leaves
from weft.errors import UsageError
from weft.world.world import World

MOST_BYTES = 1 << 20  # of a tensor that tells batches apart


def check_batch_agrees(batch: Any, world: World) -> None:
    """Hold this rank's batch against rank 0's. A loader that shuffles by itself, or has a part for each rank, is found so.

    Raises:
        UsageError: they differ.
    """
    mine = digest(batch)
    if world.told(lambda: mine) != mine:
        raise UsageError(
            f"rank {world.rank} is given another batch than rank 0, and one batch is divided among all ranks: call torch.manual_seed(0) on "
            "every rank before data are made or shuffled (or give the DataLoader a generator with a seed), and leave DistributedSampler out"
        )


def check_model_agrees(model: nn.Module, world: World) -> None:
    """Hold the real tensors of all ranks' models against one another: each rank keeps its own part of its own.

    Raises:
        UsageError: they differ; on every rank.
    """
    if world.num_ranks == 1:
        return
    real = {name: x for name, x in (*model.named_parameters(), *model.named_buffers()) if not isinstance(x, Fake) and not x.is_meta}
    mine = {name: digest(x) for name, x in real.items()}
    number = zlib.crc32(json.dumps(mine).encode())
    most, least = world.maximum([number, -number])
    if most != -least:
        theirs = json.loads(world.told(lambda: json.dumps(mine)))
        other = next((f"{name} of rank {world.rank}'s model" for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)), None)
        raise UsageError(
            f"{other or 'the model of another rank'} has other values than rank 0's, and one model is divided among all ranks: call "
            "torch.manual_seed(0) on every rank before it is built, load the same file everywhere, or build it where weft divides it (in "
            "the block of weft.auto_parallelize, or as a function for weft.parallelize)"
        )


def synchronize_generators(world: World) -> None:
    """Let torch's random numbers go on from where rank 0's are, on every rank: scripts that seed nothing start with different ones."""
    if world.num_ranks > 1:
        state = world.told(lambda: torch.random.get_rng_state().numpy().tobytes().hex())
        torch.random.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def digest(batch: Any) -> str:
    """A number for a batch's tensors: their places, kinds and shapes, and up to 1 MiB of each.

    >>> import torch
    >>> digest((torch.zeros(2), torch.ones(2))) == digest((torch.ones(2), torch.zeros(2)))
    False
    """
    checksum = 0
    for path, leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            checksum = zlib.crc32(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode(), checksum)
            some = leaf.detach().flatten()[: MOST_BYTES // max(1, leaf.element_size())].contiguous().cpu()
            checksum = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), checksum)
    return f"{checksum:08x}"
