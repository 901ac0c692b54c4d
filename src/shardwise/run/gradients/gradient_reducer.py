"""Bucketed gradient reduction that overlaps backward (Li et al., VLDB 2020, Algorithm 1), and its ZeRO-1 form.

When the last action that adds to a bucket completes it, it is all-reduced while backward goes on. Buckets are launched strictly in order,
so that all ranks launch the same ones in the same order, independent of autograd. A parameter without a gradient in this step counts as
zero.

If a bucket has a permanent buffer, a hook on every parameter copies its gradient there as it is computed. Small gradients, and all where
there is none, stay in autograd's tensors until their bucket is complete, and are then copied in one call; without a permanent buffer the
bucket's buffer exists only from then until the next
step begins, so that forward has its memory. Buckets that are not reduced have no hooks.

With ZeRO-1 (Rajbhandari et al. 2020) a bucket is reduce-scattered: each rank gets the sum of its own shard, in place, with half of an
all-reduce's bytes; the rest of the bucket is this rank's alone until `gather` is called. From stage 2 on no rank stores a full gradient: a
bucket has a buffer from its first gradient until it is scattered, in every backward anew, and the shards accumulate.

Compressed gradients (`run/gradients/compressed`) take two phases. The second phase of a bucket follows the first of the next bucket, in the
same order on all ranks; if a rank of another stage takes part, which may be waiting for this one, it follows backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.plan.compatibility import EACH, LAST
from shardwise.plan.ir.compression import Compression
from shardwise.run.gradients.compressed import DTYPES, CompressedBucket
from shardwise.run.gradients.two_level_compression import TwoLevelCompressedBucket, build_compressed_bucket
from shardwise.run.state.parameters import Bucket, FlatGroup
from shardwise.world import private
from shardwise.world.memory import Accounts
from shardwise.world.world import CollectiveWork, Group

BY_PROGRAM = "program"
MAX_COLLECTED_ELEMENTS = 1 << 12  # of a gradient that waits for its bucket, since a call takes longer than its copy
AT_END = "end"  # where ranks run different branches: buckets are complete at different places among the collectives of their backwards


class GradientReducer:
    """Accumulates the gradients of one rank's parameters over a step's microbatches and reduces them over ranks.

    Call `begin(...)` before each action that adds to gradients, with the parameters that it completes, `finish()` after the last, and
    `wait()`; gradients are then in the flat groups. `scatters`: when those of ZeRO-2 and 3 are
    scattered: by each backward, by the one that completes them (until which buckets are whole), by calls of `reduce`, or, like all others,
    after the last backward (`AT_END`). `compress`: for
    gradients that are all-reduced, or reduce-scattered by ZeRO-1. `memory`: accounts for gradient buffers. `replica_groups`: where ZeRO
    shards inside groups of replicas, the ranks with the same shards, over which shards are all-reduced after they are scattered.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        parameters: Mapping[str, torch.nn.Parameter],
        reduction_groups: Sequence[Group | None],
        sharded: bool = False,
        scatters: str = EACH,
        compress: Compression | None = None,
        memory: Accounts | None = None,
        replica_groups: Sequence[Group | None] = (),
    ) -> None:
        self._overlaps_backward = scatters != AT_END
        self._memory, self._replica_groups = memory or Accounts(), list(replica_groups) or [None] * len(groups)
        self.groups, self.parameters = list(groups), parameters
        self._reduction_groups, self._sharded, self._scatters = list(reduction_groups), sharded, scatters
        # In the order in which backward completes them: a late bucket must not hold back earlier ones.
        ready = {member.name: member.gradient_order for group in groups for member in group.members}
        numbered = [(g, bucket) for g, group in enumerate(groups) for bucket in group.buckets if not group.is_scattered]
        self.ordered_buckets = sorted(numbered, key=lambda item: max(ready[name] for name in item[1].names))
        self._bucket_of = {name: k for k, (_, bucket) in enumerate(self.ordered_buckets) for name in bucket.names}
        self._views = {name: view for group in groups for name, view in group.views.items()}
        self._completed: frozenset[str] = frozenset()
        self._is_first = dict.fromkeys(self._bucket_of, True)
        self._num_missing: list[int] = []  # by index in the order: parameters still to be completed
        self._next_bucket = 0
        self._works: list[CollectiveWork | ShardSum] = []
        self.is_reducing = True
        self.records_norms = False  # whether norms of this rank's own gradients are recorded before the reduction
        self._norms: list[Tensor] = []
        self.on_bucket: Callable[[int, Tensor], None] | None = None  # of parameter servers: called with (index in the order, bucket)
        # By index in the order; and buckets of this step in their first and second phase, in that order.
        self.compressed = {
            k: compressed for k, (g, bucket) in enumerate(self.ordered_buckets) if (compressed := self._compress(compress, g, bucket))
        }
        self._in_first_phase: list[CompressedBucket | TwoLevelCompressedBucket] = []
        self._in_second_phase: list[CompressedBucket | TwoLevelCompressedBucket] = []
        self.uncompressed: dict[int, Tensor] | None = (
            None  # if a dictionary: gets copies of gradients before compression, by index in the order
        )
        self._scatterers = {
            number: GradientScatterer(group, over, scatters not in (BY_PROGRAM, AT_END), self._replica_groups[number])
            for number, (group, over) in enumerate(zip(groups, reduction_groups, strict=True))
            if group.is_scattered and over is not None
        }
        self._scatterer_of = {member.name: scatterer for number, scatterer in self._scatterers.items() for member in groups[number].members}
        # Gradients that are copied bucket by bucket, not one by one.
        self._collected_by_bucket = frozenset(
            name for number, bucket in self.ordered_buckets if groups[number].is_allocated_per_bucket for name in bucket.names
        )
        self._is_reduced = [(over := self._reduction_groups[number]) is not None and over.size > 1 for number, _ in self.ordered_buckets]
        # Gradients that are not reduced need no hook.
        hooked = (
            name
            for (_, bucket), has_hooks in zip(self.ordered_buckets, self._is_reduced, strict=True)
            if has_hooks
            for name in bucket.names
        )
        for name in (*hooked, *self._scatterer_of):
            self._register_hook(name)

    def _compress(self, compression: Compression | None, number: int, bucket: Bucket) -> CompressedBucket | TwoLevelCompressedBucket | None:
        over, group = self._reduction_groups[number], self.groups[number]
        if compression is None or compression.kind == "none" or over is None or over.size == 1 or group.grad.dtype not in DTYPES:
            return None
        early = not group.members[0].is_on_several_stages
        size = bucket.stop - bucket.start
        return build_compressed_bucket(
            compression, bucket.names[0], size, lambda: group.bucket_gradient(bucket), over, self._sharded, overlaps_backward=early
        )

    def _register_hook(self, name: str) -> None:
        # The garbage collector does not see through parameter hooks: a strong reference would keep all parameters alive for ever.
        reducer_ref = weakref.ref(self)

        def done(parameter: Tensor) -> None:
            reducer, grad = reducer_ref(), parameter.grad
            if grad is None or reducer is None:
                return
            view = reducer._views.get(name)
            is_small = view is not None and grad.numel() <= MAX_COLLECTED_ELEMENTS and grad.dtype is view.dtype and not grad.is_sparse
            if grad is view or is_small or name in reducer._collected_by_bucket:  # autograd has accumulated into it
                reducer._on_gradient(name)
            else:
                parameter.grad = view
                reducer.add(name, grad)

        self.parameters[name].register_post_accumulate_grad_hook(done)  # type: ignore[no-untyped-call]

    def add(self, name: str, grad: Tensor) -> None:
        """Add to a parameter's gradient; at most once per parameter between two calls of `begin`."""
        if name in self._scatterer_of:
            self._scatterer_of[name].add(name, grad, is_last=self._scatters != LAST or name in self._completed)
            return
        view = self._view(name)
        if self._is_first[name]:
            view.copy_(grad)
            self._is_first[name] = False
        else:
            view.add_(grad)
        self._on_gradient(name)

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """Add the product of two matrices to a parameter's gradient, without an intermediate tensor."""
        if name in self._scatterer_of or self._views[name].dtype != a.dtype:
            self.add(name, a @ b)
            return
        view = self._view(name)
        torch.addmm(view, a, b, beta=0 if self._is_first[name] else 1, out=view)  # beta 0 also drops NaN
        self._is_first[name] = False
        self._on_gradient(name)

    def _view(self, name: str) -> Tensor:
        """Return the view of a bucket where a gradient is accumulated."""
        self._allocate(self.ordered_buckets[self._bucket_of[name]][1])
        return self._views[name]

    def _allocate(self, bucket: Bucket) -> None:
        """Allocate a bucket's buffer if it is freed."""
        if bucket.grad is not None:
            with self._memory.counting("gradients"):
                bucket.allocate()

    def _on_gradient(self, name: str) -> None:
        if name in self._completed:
            self._num_missing[self._bucket_of[name]] -= 1
            self._launch()

    def start(self) -> None:
        """Begin a step without gradients."""
        self._is_first = dict.fromkeys(self._is_first, True)
        self._num_missing = [len(bucket.names) * waits for (_, bucket), waits in zip(self.ordered_buckets, self._is_reduced, strict=True)]
        self._next_bucket = 0
        self._completed = frozenset()
        for name in self._views:
            self.parameters[name].grad = None
        for _, bucket in self.ordered_buckets:
            bucket.free()
        self._norms.clear()
        for scattered in self._scatterers.values():
            scattered.start(self.records_norms)

    @property
    def norms(self) -> list[Tensor]:
        """Norms of this rank's own gradients of the step before the reduction, one per bucket, in the same order in every step."""
        return [*self._norms, *(norm for scattered in self._scatterers.values() for norm in scattered.norms)]

    def use_buffer(self, number: int) -> None:
        """Accumulate in the groups' buffers of that number from now on; call before `start`."""
        for group in self.groups:
            group.use_gradient_buffer(group.step_buffers[number])
            self._views.update(group.views)

    def begin(self, completed: frozenset[str]) -> None:
        """Begin a backward that completes these parameters: a bucket is reduced as soon as its last one has its gradient."""
        self._completed = completed

    def reduce(self, names: Collection[str]) -> None:
        """Reduce-scatter buckets with gradients of these parameters, complete or not, if the program decides when; otherwise buckets are
        reduced when complete."""
        if self._scatters != BY_PROGRAM:
            return
        for scattered in self._scatterers.values():
            scattered.flush(names)

    def scatter_sets(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """Group `names` into sets that are scattered together; parameters that are not scattered are sets of their own."""
        sets: dict[object, list[str]] = {}
        for name in sorted(names):
            key = (id(scatterer), scatterer.bucket_of(name)) if (scatterer := self._scatterer_of.get(name)) else name
            sets.setdefault(key, []).append(name)
        return [tuple(members) for members in sets.values()]

    def buffer_like(self, name: str) -> Tensor:
        """Return a tensor like the accumulated gradient of a parameter, or like the shard of its scattered bucket."""
        return scatterer.shard_of(name) if (scatterer := self._scatterer_of.get(name)) is not None else self._views[name]

    def accumulated(self, name: str) -> tuple[Tensor, bool] | None:
        """Return the gradient accumulated so far, and whether it is in the bucket; None if there is none.

        Raises:
            ValueError: it is partly in the bucket and partly in `.grad`.
        """
        if (scatterer := self._scatterer_of.get(name)) is not None:
            return scatterer.accumulated_shard(name), True
        grad, view, is_in_bucket = self.parameters[name].grad, self._views[name], not self._is_first[name]
        if is_in_bucket and grad is not None and grad is not view:
            raise ValueError(f"the gradient of {name} is partly in its bucket and partly in .grad")
        return (view, True) if is_in_bucket else None if grad is None else (grad, False)

    @torch.no_grad()
    def restore(self, name: str, value: Tensor, is_in_bucket: bool) -> None:
        """Restore an accumulated gradient after `start`."""
        if (scatterer := self._scatterer_of.get(name)) is not None:
            scatterer.shard_of(name).copy_(value)
        elif is_in_bucket:
            self._view(name).copy_(value)
            self._is_first[name] = False
        else:
            self.parameters[name].grad = torch.empty_like(self.parameters[name], dtype=value.dtype).copy_(value)

    def _launch(self) -> None:
        while self._overlaps_backward and self._next_bucket < len(self.ordered_buckets) and self._num_missing[self._next_bucket] <= 0:
            self._reduce_bucket(self._next_bucket)
            self._next_bucket += 1

    def _fill_bucket(self, place: int) -> Tensor:
        """Copy gradients that are not in the bucket yet; missing ones are zero. Return the bucket's gradients."""
        number, bucket = self.ordered_buckets[place]
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        if bucket.grad is not None:
            self._allocate(bucket)
        parameters, of_name, is_first = self.parameters, self._views, self._is_first
        for name in bucket.names:
            parameter, view = parameters[name], of_name[name]
            grad = parameter.grad
            if grad is not None and grad is not view:
                parameter.grad = None
                if is_first[name]:
                    views.append(view)
                    gradients.append(grad)
                else:
                    view.add_(grad)
            elif is_first[name]:
                view.zero_()
            is_first[name] = False
        if gradients:
            private.copy_tensors(views, gradients)
        return self.groups[number].bucket_gradient(bucket)

    def _reduce_bucket(self, place: int) -> None:
        over = self._reduction_groups[self.ordered_buckets[place][0]]
        if over is None or not self._is_reduced[place]:
            return
        gradient = self._fill_bucket(place)
        if self.records_norms:
            self._norms.append(norm_of(gradient))
        if self.on_bucket is not None:
            self.on_bucket(place, gradient)
            return
        if not self.is_reducing:
            return
        if (compressed := self.compressed.get(place)) is not None:
            if self.uncompressed is not None:
                self.uncompressed[place] = gradient.clone()
            compressed.start()
            self._begin_second_phase(in_backward=True)
            self._in_first_phase.append(compressed)
        elif self._sharded:
            shard = gradient.view(over.size, -1)[over.index]
            work = over.reduce_scatter_into(shard, gradient, wait=False)
            self._begin_sums_beyond()
            beyond = self._replica_groups[self.ordered_buckets[place][0]]
            self._works.append(work if beyond is None else ShardSum(work, shard, beyond))
        else:
            self._works.append(over.all_reduce(gradient, wait=False))

    def _begin_sums_beyond(self) -> None:
        """Begin to all-reduce shards over groups of replicas, of a bucket once the scatter of the next has begun."""
        if self._works and isinstance(last := self._works[-1], ShardSum):
            last.begin_beyond()

    def _begin_second_phase(self, in_backward: bool) -> None:
        """Begin the second phase of buckets whose first phase was started; in backward only of those that may overlap it."""
        remaining = [bucket for bucket in self._in_first_phase if in_backward and not bucket.overlaps_backward]
        for bucket in self._in_first_phase:
            if bucket.overlaps_backward or not in_backward:
                bucket.reduce_received()
                self._in_second_phase.append(bucket)
        self._in_first_phase = remaining

    def finish(self) -> None:
        """Launch the remaining buckets in order after the last backward, and fill those that are not reduced."""
        for scattered in self._scatterers.values():
            scattered.flush()
        while self._next_bucket < len(self.ordered_buckets):
            self._reduce_bucket(self._next_bucket)
            self._next_bucket += 1
        for place, is_exchanged in enumerate(self._is_reduced):
            if not is_exchanged:
                gradient = self._fill_bucket(place)
                if self.records_norms:
                    self._norms.append(norm_of(gradient))

    def take_pending_work(self) -> list[CollectiveWork]:
        """Return the pending all-reduces of uncompressed gradients, after `finish` and instead of `wait`."""
        works, self._works = self._works, []
        return [work for work in works if not isinstance(work, ShardSum)]  # stale updates are not sharded

    def wait(self) -> None:
        """Wait for all reductions."""
        self._begin_second_phase(in_backward=False)
        for work in self._works:
            work.wait()
        self._works.clear()
        for bucket in self._in_second_phase:
            bucket.finish()
        self._in_second_phase.clear()
        for scattered in self._scatterers.values():
            scattered.wait()

    def gather(self) -> None:
        """Gather the ZeRO-1 shards after `wait`, so that each rank has the full sums. Every rank calls it, or none."""
        if not self._sharded:
            return
        for number, bucket in self.ordered_buckets:
            over = self._reduction_groups[number]
            if over is not None and over.size > 1:
                gradient = self.groups[number].bucket_gradient(bucket)
                over.all_gather_into(gradient, gradient.view(over.size, -1)[over.index].clone())


_MIN_NORM_BYTES = 4  # bytes of the narrowest dtype that can hold a sum of squares
_MAX_PENDING = 1  # buckets that are scattered at the same time


def norm_of(x: Tensor) -> Tensor:
    """Return the 2-norm [] of all elements."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=None if x.dtype.itemsize >= _MIN_NORM_BYTES else torch.float32)
    return norm


@dataclass
class ShardSum:
    """The pending reduction of a bucket inside a group of replicas, and then of this rank's shard of it over all such groups."""

    work: CollectiveWork
    shard: Tensor
    beyond: Group
    is_beyond: bool = False

    def begin_beyond(self) -> None:
        """Wait for the reduction inside, and begin the one beyond."""
        if not self.is_beyond:
            self.work.wait()
            self.work, self.is_beyond = self.beyond.all_reduce(self.shard, wait=False), True

    def wait(self) -> None:
        self.begin_beyond()
        self.work.wait()


@dataclass
class _OpenBucket:
    """A bucket that is being filled: its buffer, and the parameters without a gradient yet."""

    full: Tensor
    missing: set[str]


class GradientScatterer:
    """Reduces the gradients of one group and accumulates them in its shards over several backwards.

    Without `scatters_when_full` nothing is scattered before `flush`, which a program calls.
    """

    def __init__(
        self, group: FlatGroup, reduction_group: Group, scatters_when_full: bool = True, replica_group: Group | None = None
    ) -> None:
        self._replica_group = replica_group
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

    def add(self, name: str, grad: Tensor, is_last: bool = True) -> None:
        """Add to a parameter's gradient. `is_last`: its bucket may be scattered as soon as all others of it have theirs."""
        number = self._bucket_numbers[name]
        open_bucket = self._open.get(number)
        if open_bucket is None:
            bucket = self._group.buckets[number]
            open_bucket = self._open[number] = _OpenBucket(
                self._group.grad.new_zeros(bucket.stop - bucket.start), set(self._expected[number])
            )
        open_bucket.full[self._slices[name]].add_(grad.reshape(-1))
        if is_last:
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
        """Wait for all reductions; all-reduce the shards over groups of replicas, once for all microbatches."""
        self._wait_until(0)
        if self._replica_group is not None:
            self._replica_group.all_reduce(self._group.grad)

    def _scatter(self, number: int) -> None:
        full = self._open.pop(number).full
        if self._records_norms:
            self.norms.append(norm_of(full))
        received = full.view(self._reduction_group.size, -1)[self._reduction_group.index]  # in place: no room for all shards
        self._works.append((self._reduction_group.reduce_scatter_into(received, full, wait=False), received, self._shards[number]))
        self._wait_until(_MAX_PENDING)

    def _wait_until(self, num_pending: int) -> None:
        while len(self._works) > num_pending:
            work, received, piece = self._works.pop(0)
            work.wait()
            piece.add_(received)
