"""Agreement of ranks on the batch of a call of a plain loop's model: how many samples it has, and which of them each rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from shardwise.errors import Infeasible, UsageError
from shardwise.plan.ir.placement import even_shard_range
from shardwise.plan.layout import Layout
from shardwise.run.rank_agreement import digest_tensors
from shardwise.world.world import World


class BatchMode(Enum):
    """The samples with which ranks call a model: each with its shard of the batch; each with the global batch, computed in full by each; or
    each with the global batch, of which it computes its shard and returns all outputs."""

    LOCAL_SHARD = 0
    REPLICATED = 1
    GLOBAL_BATCH = 2

    __hash__ = object.__hash__  # members are unique, and enumerations hash their names, in Python


@dataclass(frozen=True)
class CallSamples:
    """The samples of one rank's call. `form_checksum`: of the form of its inputs."""

    inputs: Any
    num_local: int
    form_checksum: int


def agree_on_batch(world: World, layout: Layout, places: Sequence[int], call: CallSamples, is_global_batch: bool) -> tuple[int, BatchMode]:
    """Agree on the global number of samples and the mode: ranks all-gather their number of samples, form and digest (24 bytes each).

    Args:
        places: by rank, the index of its shard of samples.
        is_global_batch: whether the loop gives every rank whole batches.

    Raises:
        Infeasible: on all ranks, if their calls would deadlock or reduce gradients of mismatched samples.
    """
    local_info = [call.num_local, call.form_checksum, int(digest_tensors(call.inputs), 16)]
    counts, forms, digests = world.world_group.all_gather(torch.tensor([local_info], dtype=torch.int64, device=world.device), 0).T.tolist()
    if len(set(forms)) > 1:
        raise Infeasible(
            "ranks call the model with tensors of different shapes or kinds, and exchange values and gradients; draw batches through "
            "shardwise.shard(loader), or pad them to one shape on all ranks"
        )
    if len(set(digests)) == 1:
        return call.num_local, BatchMode.GLOBAL_BATCH
    distinct_batches = {(place, number) for place, number in zip(places, digests, strict=True)}
    if is_global_batch or len(distinct_batches) > len(set(places)):
        affected_ranks = "all of them" if is_global_batch else "those with the same samples"
        raise UsageError(
            f"ranks call the model with different batches, and {affected_ranks} need the same: let every rank load and shuffle "
            "alike (the same seed on every rank, no DistributedSampler)"
        )
    n = max(places) + 1
    samples = sum(dict(zip(places, counts, strict=True)).values())
    if counts != [even_shard_range(samples, n, place)[1] for place in places]:
        raise Infeasible(
            f"ranks call the model with {', '.join(map(str, counts))} samples, which {layout} divides otherwise; draw batches through "
            "shardwise.shard(loader), or give every rank as many"
        )
    return samples, BatchMode.LOCAL_SHARD
