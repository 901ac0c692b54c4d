"""Reduce-scatter of gradients of which a rank stores its own shards only: ZeRO from stage 2 on (Rajbhandari et al. 2020).

The `grad` of a flat group are this rank's shards, to which reduced gradients are added. A bucket has a buffer from its first gradient until
it is reduce-scattered, when each of its parameters has had one, or at the end of the step. All ranks of a group run the same layers in the
same order, so they scatter the same buckets in the same order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.state.parameters import FlatGroup
from shardwise.world.world import CollectiveWork, Group

_MIN_NORM_BYTES = 4  # bytes of the narrowest dtype that can hold a sum of squares
_MAX_PENDING = 1  # buckets that are scattered at the same time


def norm_of(x: Tensor) -> Tensor:
    """Return the 2-norm [] of all elements."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=None if x.dtype.itemsize >= _MIN_NORM_BYTES else torch.float32)
    return norm


@dataclass
class _OpenBucket:
    """A bucket that is being filled: its buffer, and the parameters without a gradient yet."""

    full: Tensor
    missing: set[str]


class GradientScatterer:
    """Reduces the gradients of one group and accumulates them in its shards over several backwards.

    Without `scatters_when_full` nothing is scattered before `flush`, which a program calls.
    """

    def __init__(self, group: FlatGroup, reduction_group: Group, scatters_when_full: bool = True) -> None:
        self._group, self._reduction_group, self._scatters_when_full = group, reduction_group, scatters_when_full
        self._bucket_numbers = {name: k for k, bucket in enumerate(group.buckets) for name in bucket.names}
        self._shards = [group.grad[at : at + length] for _, at, length in group.shard_ranges()]
        self._open: dict[int, _OpenBucket] = {}
        self._records_norms, self.norms = False, list[Tensor]()
        self._works: list[tuple[CollectiveWork, Tensor, Tensor]] = []
        read = {member.name for member in group.members if member.layers} or set(self._bucket_numbers)
        self._expected = [read.intersection(bucket.names) for bucket in group.buckets]
        self._slices: dict[str, slice] = {}
        for member, start in zip(group.members, group.starts, strict=True):
            begin = start - group.buckets[self._bucket_numbers[member.name]].start
            self._slices[member.name] = slice(begin, begin + member.size)

    def add(self, name: str, grad: Tensor) -> None:
        """Add to a parameter's gradient."""
        number = self._bucket_numbers[name]
        open_bucket = self._open.get(number)
        if open_bucket is None:
            bucket = self._group.buckets[number]
            open_bucket = self._open[number] = _OpenBucket(
                self._group.grad.new_zeros(bucket.stop - bucket.start), set(self._expected[number])
            )
        open_bucket.full[self._slices[name]].add_(grad.reshape(-1))
        open_bucket.missing.discard(name)
        if not open_bucket.missing and self._scatters_when_full:
            self._scatter(number)

    def bucket_of(self, name: str) -> int:
        """Return the number of the bucket that contains a parameter."""
        return self._bucket_numbers[name]

    def shard_of(self, name: str) -> Tensor:
        """Return this rank's gradient shard of the bucket that contains a parameter."""
        return self._shards[self._bucket_numbers[name]]

    def accumulated_shard(self, name: str) -> Tensor:
        """Return the shard with all gradients so far. Raises ValueError if some of them are still to be scattered."""
        if self._bucket_numbers[name] in self._open:
            raise ValueError(f"other gradients in the bucket of {name} are still missing")
        self._wait_until(0)
        return self.shard_of(name)

    def start(self, records_norms: bool = False) -> None:
        """Begin a step with zero shards. `records_norms`: whether norms of the buckets before reduction are recorded."""
        self._group.grad.zero_()
        self._records_norms = records_norms
        self.norms.clear()

    def flush(self, names: Collection[str] | None = None) -> None:
        """Scatter incomplete buckets (those with any of `names`); missing gradients count as zero."""
        for number in sorted(self._open):
            if names is None or not self._expected[number].isdisjoint(names):
                self._scatter(number)

    def wait(self) -> None:
        """Wait for all reductions."""
        self._wait_until(0)

    def _scatter(self, number: int) -> None:
        full = self._open.pop(number).full
        if self._records_norms:
            self.norms.append(norm_of(full))
        received = torch.empty_like(self._shards[number])
        self._works.append((self._reduction_group.reduce_scatter_into(received, full, wait=False), received, self._shards[number]))
        self._wait_until(_MAX_PENDING)

    def _wait_until(self, num_pending: int) -> None:
        while len(self._works) > num_pending:
            work, received, piece = self._works.pop(0)
            work.wait()
            piece.add_(received)
