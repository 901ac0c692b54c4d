"""All-gathers of weight shards in a plain loop (ZeRO): one message for a layer's weights, under way while the layer before runs.

In: the shards of a graph's parameters, in buckets in the order of use. Out: whole weights, of two buckets at most at a time. With zero=3
backward gathers again, the bucket before ahead; the order is that of the program `gather_layers`, by which it is checked and simulated.
Gradients of a bucket are reduce-scattered as one message when all of them are complete.

Not modelled: the bound of two where a layer reads a weight of an earlier one (tied weights).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwise.lower.redistribute import redistribute, redistribute_forward
from shardwise.plan.ir.placement import D, Placement, R, Shard, dual_of
from shardwise.world import private
from shardwise.world.world import CollectiveWork, Group

Observer = Callable[[str, int], None]  # ("UNSHARD" or "RESHARD", number of the bucket)


@dataclass(frozen=True)
class ZeroShard:
    """A parameter stored with one placement over `group` and read with another (replicated, or with partial gradients).

    `dtype`: its own; `held_dtype`: in which it is gathered and read, if it is another.
    """

    name: str
    placement: Shard
    read_placement: Placement
    group: Group
    dtype: torch.dtype
    held_dtype: torch.dtype | None = None

    @property
    def is_contiguous(self) -> bool:
        """Return whether each rank has one range of the dimension, so that it can be gathered with others."""
        return not self.placement.runs

    def shard_shapes(self, local: Tensor) -> list[torch.Size]:
        """Return the shape of every rank's shard, given this rank's."""
        dim, n = self.placement.dim, self.group.size
        lengths = self.placement.lengths or (local.shape[dim],) * n
        return [torch.Size((*local.shape[:dim], length, *local.shape[dim + 1 :])) for length in lengths]


@dataclass(frozen=True)
class GatherBucket:
    """Shards that are gathered as one message. `number`: in the order of use. `positions`: of the shards among the graph's parameters.
    `is_prefetched`: whether all ranks gather it in the same place, so that it may be gathered ahead."""

    number: int
    positions: tuple[int, ...]
    shards: tuple[ZeroShard, ...]
    is_prefetched: bool = True

    @property
    def group(self) -> Group:
        """The ranks that have the shards."""
        return self.shards[0].group

    def begin(self, local_shards: Sequence[Tensor]) -> _PendingBucket:
        """Start to gather the whole weights."""
        held = [x if shard.held_dtype is None else x.to(shard.held_dtype) for x, shard in zip(local_shards, self.shards, strict=True)]
        if not self.shards[0].is_contiguous:
            whole = [redistribute_forward(x, s.placement, R, s.group) for x, s in zip(held, self.shards, strict=True)]
            return _PendingBucket(self, [], None, whole)
        shapes = [shard.shard_shapes(x) for shard, x in zip(self.shards, held, strict=True)]
        longest = max(sum(by_rank[rank].numel() for by_rank in shapes) for rank in range(self.group.size))
        flat, at = held[0].new_empty(longest), 0
        for x in held:
            flat[at : at + x.numel()].view(x.shape).copy_(x)
            at += x.numel()
        gathered = flat.new_empty(self.group.size * longest)
        return _PendingBucket(self, shapes, self.group.all_gather_into(gathered, flat, wait=False), [gathered, flat])

    def scatter(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's shards of the sums of gradients over ranks; only of contiguous shards, all of one dtype."""
        n = self.group.size
        pieces = [
            torch.split(grad, list(shard.placement.local_sizes(grad.shape[shard.placement.dim], n)), shard.placement.dim)
            for grad, shard in zip(gradients, self.shards, strict=True)
        ]
        by_rank = [[x[rank] for x in pieces] for rank in range(n)]
        lengths = [sum(x.numel() for x in of_rank) for of_rank in by_rank]
        own, shapes = self.group.index, [x[self.group.index].shape for x in pieces]
        flat = self.group.reduce_scatter(torch.cat([x.reshape(-1) for of_rank in by_rank for x in of_rank]), 0, lengths)
        parts = torch.split(flat, [x.numel() for x in by_rank[own]])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass
class _PendingBucket:
    """A bucket that is being gathered into `buffers`; its whole weights, once it is `finish`ed."""

    bucket: GatherBucket
    shapes: list[list[torch.Size]]
    work: CollectiveWork | None
    buffers: list[Tensor]

    def finish(self) -> list[Tensor]:
        """Return the whole weights."""
        if self.work is None:
            return self.buffers
        self.work.wait()
        rows = self.buffers[0].view(self.bucket.group.size, -1)
        whole, at = [], [0] * len(rows)
        for shapes, shard in zip(self.shapes, self.bucket.shards, strict=True):
            parts = [rows[rank, at[rank] : at[rank] + shape.numel()].view(shape) for rank, shape in enumerate(shapes)]
            whole.append(torch.cat(parts, shard.placement.dim))
            at = [start + shape.numel() for start, shape in zip(at, shapes, strict=True)]
        return whole


@dataclass(eq=False)
class ForwardGathers:
    """The gathers of one forward and of its backward. `parameters`: this rank's shards, by position."""

    buckets: Sequence[GatherBucket]
    parameters: Sequence[Tensor]
    observe: Observer | None = None
    _pending: dict[int, _PendingBucket] = field(default_factory=dict)
    _whole: dict[int, list[Tensor]] = field(default_factory=dict)  # in backward
    _is_in_backward: bool = False

    @cached_property
    def _prefetched(self) -> list[int]:
        return [bucket.number for bucket in self.buckets if bucket.is_prefetched]

    def gather(self, number: int, step: int) -> list[Tensor]:
        """Return the whole weights of a bucket; the next one in direction `step` (1 or -1) is under way then."""
        self._start(number)
        if number in self._prefetched:
            following = self._prefetched.index(number) + step
            if 0 <= following < len(self._prefetched):
                self._start(self._prefetched[following])
        return self._pending.pop(number).finish()

    def whole_weight(self, number: int, index: int) -> Tensor:
        """Return a weight in backward, which frees it after its bucket's gradients."""
        if not self._is_in_backward and private.is_in_backward():
            self._is_in_backward = True
            private.after_backward(self.end)
        if number not in self._whole:
            for other in list(self._whole):  # of which no more is read, if gradients come in the order of layers
                self.free(other)
            self._whole[number] = self.gather(number, -1)
        return self._whole[number][index]

    def free(self, number: int) -> None:
        """Free a bucket's weights."""
        if self._whole.pop(number, None) is not None and self.observe is not None:
            self.observe("RESHARD", number)

    def end(self) -> None:
        """Wait for gathers that nobody has read, and free all."""
        self._is_in_backward = False
        while self._pending:
            self._pending.popitem()[1].finish()
        for number in list(self._whole):
            self.free(number)

    def _start(self, number: int) -> None:
        if number in self._pending or number in self._whole:
            return
        if self.observe is not None:
            self.observe("UNSHARD", number)
        bucket = self.buckets[number]
        self._pending[number] = bucket.begin([self.parameters[i].detach().as_subclass(Tensor) for i in bucket.positions])


class _GatherWeights(torch.autograd.Function):
    """Whole weights of a bucket; their gradients are reduce-scattered in all bits of the parameters."""

    @staticmethod
    def forward(ctx: Any, gathers: ForwardGathers, number: int, *local_shards: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gathers, ctx.number, ctx.dtypes = gathers, number, [x.dtype for x in local_shards]
        return tuple(gathers.gather(number, 1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.gathers.free(ctx.number)
        bucket: GatherBucket = ctx.gathers.buckets[ctx.number]
        wide = [None if x is None else x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)]
        known = [x for x in wide if x is not None]
        first = bucket.shards[0]
        if torch.is_grad_enabled() or len(known) < len(wide) or first.read_placement is not D or not first.is_contiguous:
            shards = zip(wide, bucket.shards, strict=True)
            return None, None, *(None if x is None else _scatter_one(x, shard) for x, shard in shards)
        return None, None, *bucket.scatter(known)


def _scatter_one(grad: Tensor, shard: ZeroShard) -> Tensor:
    return redistribute(grad, dual_of(shard.read_placement), dual_of(shard.placement), shard.group)


def gather_weights(gathers: ForwardGathers, number: int, local_shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the whole weights of a bucket, differentiable by its shards."""
    whole: tuple[Tensor, ...] = _GatherWeights.apply(gathers, number, *local_shards)  # type: ignore[no-untyped-call]
    return whole
