"""A communication hook for torch's DistributedDataParallel that all-reduces its buckets as shardwise does. In: a name. Out: DDP's (state,
hook).

Ranks rendezvous in the store of the user's initialised process group, over connections of their own: the user's group is not used.
Buckets are divided by the number of ranks first, as in DDP, and are reduced in a thread that overlaps backward. Not modelled: uneven
inputs (DDP's `join`), which need DDP's own collectives.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardwise.errors import UsageError, did_you_mean
from shardwise.plan.ir.choice import AUTO, NAMES, SYNONYMS, AllReduceChoices
from shardwise.plan.ir.program import Program
from shardwise.world import private
from shardwise.world.comm.all_reduce import CollectiveDispatcher
from shardwise.world.comm.group import Group
from shardwise.world.comm.worker import BackgroundWorker
from shardwise.world.world import World

AUTO_ALGORITHM = "hierarchical"  # native on one host; between several it makes the best use of each host's memory


class CommHookState:
    """State of the hook between buckets. Connected by the first bucket."""

    def __init__(self, choices: AllReduceChoices, program_of: Callable[[str, str, int], Program], process_group: Any) -> None:
        self._choices, self._program_of, self._process_group = choices, program_of, process_group
        self._worker = BackgroundWorker()
        self._sums: CollectiveDispatcher | None = None
        self._group: Group | None = None

    def start(self, bucket: Tensor) -> Future[Tensor]:
        """Return the future of the mean of flat `bucket` over the ranks, in place."""
        if self._group is None:
            self._connect(bucket.device)
        mean: Future[Tensor] = Future(devices=[bucket.device] if bucket.is_cuda else None)
        self._worker.submit(lambda: self._average(bucket, mean))
        # DDP takes an error in a future's value for a tensor; it raises one that a callback raises.
        return mean.then(lambda ended: ended.value())

    def _connect(self, device: torch.device) -> None:
        ranks = tuple(dist.get_process_group_ranks(self._process_group))
        timeout_s = private.timeout_of(self._process_group, device)
        store, me = private.default_store(), dist.get_rank()
        # Every rank's n-th hook connects with the other ranks' n-th.
        prefix = f"shardwise/comm_hook/{','.join(map(str, ranks))}"
        number = store.add(f"{prefix}/{me}", 1)
        world = World(
            ranks.index(me), len(ranks), private.prefix_store(f"{prefix}/{number}", store), device=device, host="", timeout_s=timeout_s
        )
        self._group = world.world_group
        self._sums = CollectiveDispatcher(self._group, self._choices, self._program_of)

    def _average(self, bucket: Tensor, mean: Future[Tensor]) -> None:
        assert self._group is not None
        assert self._sums is not None
        try:
            bucket.div_(self._group.size)
            if self._group.size > 1:
                _ = self._sums.all_reduce(bucket, wait=True) or self._group.all_reduce(bucket)
            mean.set_result(bucket)
        except BaseException as error:
            exception: Any = error if isinstance(error, Exception) else RuntimeError(str(error))
            mean.set_exception(exception)


def average_bucket(state: CommHookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients over the ranks; DDP's hook."""
    return state.start(bucket.buffer())


def comm_hook(
    name: str, program_of: Callable[[str, str, int], Program], process_group: Any = None
) -> tuple[CommHookState, Callable[..., Future[Tensor]]]:
    """Return DDP's (state, hook), see `shardwise.comm_hook`. `program_of`: (collective, algorithm, ranks) to its program.

    Raises:
        UsageError: an unknown name (names the nearest), or no process group.
    """
    names = (AUTO, *SYNONYMS, *NAMES)
    if name not in names:
        raise UsageError(f"comm_hook({name!r}): no algorithm has this name{did_you_mean(name, names)}; use one of {', '.join(names)}")
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("comm_hook needs torch's process group; call torch.distributed.init_process_group first, as DDP needs it too")
    chosen = AUTO_ALGORITHM if name == AUTO else SYNONYMS.get(name, name)
    return CommHookState(AllReduceChoices(default=chosen), program_of, process_group), average_bucket
