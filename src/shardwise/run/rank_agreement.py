"""Check that all ranks start from the same batch and the same model before these are sharded, and synchronise random number generators.

In: a batch, a module. Out: nothing, or an error that names what differs.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.fakes import Fake
from shardwise.capture.nesting import named_leaves
from shardwise.errors import UsageError
from shardwise.world.world import World

MAX_DIGESTED_BYTES = 1 << 20  # of each tensor


def check_batch_agrees(batch: Any, world: World) -> None:
    """Compare this rank's batch with rank 0's; finds data loaders that shuffle or shard by themselves.

    Raises:
        UsageError: they differ.
    """
    local_digest = digest_tensors(batch)
    if world.broadcast_text(lambda: local_digest) != local_digest:
        raise other_batch_error(world)


def other_batch_error(world: World) -> UsageError:
    """Return the error of a rank whose batch is not rank 0's."""
    return UsageError(
        f"rank {world.rank} is given another batch than rank 0, and one batch is divided among all ranks: call torch.manual_seed(0) on "
        "every rank before data are made or shuffled (or give the DataLoader a generator with a seed), and leave DistributedSampler out"
    )


def check_model_agrees(model: nn.Module, world: World) -> None:
    """Compare the real tensors of all ranks' models, since each rank takes its shards from its own.

    Raises:
        UsageError: they differ; on every rank.
    """
    if world.num_ranks == 1:
        return
    real = {name: x for name, x in (*model.named_parameters(), *model.named_buffers()) if not isinstance(x, Fake) and not x.is_meta}
    ours = {name: digest_tensors(x) for name, x in real.items()}
    checksum = zlib.crc32(json.dumps(ours).encode())
    largest, smallest = world.all_reduce_max([checksum, -checksum])
    if largest != -smallest:
        theirs = json.loads(world.broadcast_text(lambda: json.dumps(ours)))
        first = next((f"{name} of rank {world.rank}'s model" for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), None)
        raise UsageError(
            f"{first or 'the model of another rank'} has other values than rank 0's, and one model is divided among all ranks: call "
            "torch.manual_seed(0) on every rank before it is built, load the same file everywhere, or build it where shardwise divides "
            "it (in "
            "the block of shardwise.auto_parallelize, or as a function for shardwise.parallelize)"
        )


def synchronize_generators(world: World) -> None:
    """Copy the state of rank 0's default torch generator to every rank, for scripts that set no seed."""
    if world.num_ranks > 1:
        state = world.broadcast_text(lambda: torch.random.get_rng_state().numpy().tobytes().hex())
        torch.random.set_rng_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def digest_tensors(batch: Any) -> str:
    """Checksum of a batch's tensors: their paths, dtypes and shapes, and up to 1 MiB of each.

    >>> import torch
    >>> digest_tensors((torch.zeros(2), torch.ones(2))) == digest_tensors((torch.ones(2), torch.zeros(2)))
    False
    """
    checksum = 0
    for path, leaf in named_leaves(batch):
        if isinstance(leaf, Tensor):
            checksum = zlib.crc32(f"{path} {leaf.dtype} {tuple(leaf.shape)}".encode(), checksum)
            head = leaf.detach().flatten()[: MAX_DIGESTED_BYTES // max(1, leaf.element_size())].contiguous().cpu()
            checksum = zlib.crc32(head.view(torch.uint8).numpy().tobytes(), checksum)
    return f"{checksum:08x}"
