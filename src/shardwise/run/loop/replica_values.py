"""Values of a plain loop that each data-parallel replica computes from its own rows: reduce them, or gather the rows.

`torch.distributed` shows libraries (torchmetrics) the same replicas: ranks that hold one shard of the batch count once. A loop whose ranks
all load whole batches has the serial run's values already, which stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.capture.nesting import BatchLeaves, map_tensors
from shardwise.errors import UsageError
from shardwise.run.loop.global_reductions import ShardedTensorBase
from shardwise.run.rank_agreement import digest_tensors
from shardwise.world.comm.group import Group
from shardwise.world.launch.current import DataParallelCoordinate, current_data_coordinate, current_world, loopback_of_one_host
from shardwise.world.world import World

ReduceOp = Literal["sum", "mean", "max", "min"]
_UNDIVIDED = "0" * 8  # digest in place of a batch's, on ranks whose batches come through `shardwise.shard`


def reduce_over_replicas(value: Any, op: ReduceOp = "sum") -> Any:
    """Return the sum (or mean, max, min) of a value over the replicas of the model that was divided last (`shardwise.reduce`).

    Each replica computes its value from its own rows, which `shardwise.shard` gives it: the number of right answers, a sum of losses. Ranks
    that share the rows of a replica (`tensor`) count once. Where all ranks call the model with the same whole batches, the value is that of
    the serial run and is returned as it is. Every rank calls it.

    Args:
        value: a number, a tensor, or a tuple, list or dict of them.

    Returns:
        The same on every rank, in new tensors without gradients.

    Raises:
        UsageError: no model is divided, an operation that does not exist, or a value that is neither number nor tensor.

    >>> import shardwise
    >>> shardwise.reduce({"right": 3, "of": 4.0})
    {'right': 3, 'of': 4.0}
    """
    if op not in ("sum", "mean", "max", "min"):
        raise UsageError(f"shardwise.reduce has sum, mean, max and min, and no {op!r}")
    group = _replica_group("reduce")

    def reduce_tensor(x: Tensor) -> Tensor:
        if isinstance(x, ShardedTensorBase):
            raise UsageError("shardwise.reduce is given a rank's part of a weight; shardwise.full_state_dict gathers weights")
        result = x.detach().clone()
        if group is not None:
            moved = result.to(group.device, copy=True, memory_format=torch.contiguous_format)
            moved = moved.to(torch.int64) if x.dtype is torch.bool and op in ("sum", "mean") else moved
            group.all_reduce(moved, op="sum" if op == "mean" else op)
            result = (moved / group.size if op == "mean" else moved).to(x.device)
        return result

    return _map_values(value, reduce_tensor, "reduce")


def gather_rows(value: Any) -> Any:
    """Return the rows of all replicas, concatenated in dimension 0, in the order of the serial run's batch (`shardwise.gather`).

    Args:
        value: a tensor with this replica's rows (what the model returned, targets), or a tuple, list or dict of such. Replicas may have
            unequal numbers of rows.

    Returns:
        The same on every rank, in new tensors without gradients; what all ranks have whole stays as it is.

    Raises:
        UsageError: no model is divided, or a tensor without dimensions.

    >>> import torch, shardwise
    >>> shardwise.gather(torch.arange(3))
    tensor([0, 1, 2])
    """
    group, where = _replica_group("gather"), current_data_coordinate()
    has_all_rows = where is not None and where.called_batch.has_all_rows

    def gather_tensor(x: Tensor) -> Tensor:
        if not x.dim():
            raise UsageError("shardwise.gather joins rows, and is given a tensor without dimensions: x.reshape(1)")
        if group is None or has_all_rows:
            return x.detach().clone()
        local = x.detach().to(group.device)
        lengths = group.all_gather(torch.tensor([len(x)], device=group.device)).tolist()
        return group.all_gather(local, 0, lengths).to(x.device)

    return _map_values(value, gather_tensor, "gather", takes_numbers=False)


def note_batch(batch: Any) -> None:
    """Record whether the batch of a call of a divided module came through `shardwise.shard`."""
    where = current_data_coordinate()
    if where is None or len(where.ranks) == 1:
        return
    called = where.called_batch
    leaves = BatchLeaves(batch)
    samples = leaves.num_samples
    called.has_all_rows = bool(samples) and samples == leaves.num_rows
    if samples:
        called.digest = ""
    elif not called.digest:
        called.digest = digest_tensors(batch)
        if where.world is not None and where.world.torch_ranks == where.ranks and where.world.rank == 0 and not called.was_reported:
            called.was_reported = True
            print(
                "shardwise: the model is called with a batch that did not come through shardwise.shard, which is right for the model. But "
                f"a library that sums over ranks of torch.distributed (torchmetrics) still sees {len(where.ranks)} of them, and counts "
                "such batches as often: draw what it counts through shardwise.shard(loader)",
                file=sys.stderr,
                flush=True,
            )


def expose_replicas(where: DataParallelCoordinate) -> None:
    """Initialize `torch.distributed` with the replicas of a plain loop, unless it is initialized; then report where its ranks are others.

    Every rank calls it, before the first batch."""
    if where.world is None or len(where.ranks) == 1 or not dist.is_available():
        return
    if not dist.is_initialized():
        _initialize_torch_distributed(where.world, where.ranks)
    elif dist.get_world_size() != len(where.ranks) and not where.called_batch.was_reported and where.world.rank == 0:
        where.called_batch.was_reported = True
        print(
            f"shardwise: torch.distributed was initialized with {dist.get_world_size()} ranks before, and the layout has "
            f"{len(where.ranks)} replicas with rows of their own: libraries that sum over all of its ranks (torchmetrics) count "
            "rows more or less often. Leave torch.distributed.init_process_group out, or sum by shardwise.reduce",
            file=sys.stderr,
            flush=True,
        )


def _initialize_torch_distributed(world: World, ranks: tuple[int, ...]) -> None:
    """Initialize torch's default process group with `ranks`, in their order."""
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" and dist.is_nccl_available() else "gloo"
    store = world.open_substore(f"replicas/{','.join(map(str, ranks))}")
    with loopback_of_one_host(world):
        dist.init_process_group(backend, world_size=len(ranks), rank=ranks.index(world.rank), store=store)
    world.torch_ranks = ranks


def _replica_group(verb: str) -> Group | None:
    """Return the group of the replicas; None if every rank has the whole batch."""
    where = current_data_coordinate()
    if where is None or where.world is None:
        if current_world().num_ranks > 1:
            raise UsageError(
                f"shardwise.{verb} works over the replicas of a model: use it after shardwise.auto_parallelize (an engine's results "
                "are those of all ranks already)"
            )
        return None
    if len(where.ranks) == 1:
        return None
    group = where.world.group(where.ranks)
    digest = torch.tensor([int(where.called_batch.digest or _UNDIVIDED, 16)], device=group.device)
    digests = set(group.all_gather(digest).tolist())
    return None if len(digests) == 1 and digests != {0} else group


def _map_values(value: Any, change: Callable[[Tensor], Tensor], verb: str, takes_numbers: bool = True) -> Any:
    if isinstance(value, Mapping):
        return {key: _map_values(x, change, verb, takes_numbers) for key, x in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_values(x, change, verb, takes_numbers) for x in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if takes_numbers and isinstance(value, int | float):
        return change(torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)).item()
    if not isinstance(value, Tensor):
        kinds = "numbers, tensors" if takes_numbers else "tensors"
        raise UsageError(f"shardwise.{verb} takes {kinds}, and tuples, lists and dicts of them, and is given a {type(value).__name__}")
    return map_tensors(value, change)
