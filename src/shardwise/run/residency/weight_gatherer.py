"""All-gather of sharded weights layer by layer: stage 3 of ZeRO (Rajbhandari et al. 2020), also known as fully sharded data parallelism.

The `data` of flat groups are this rank's shards. Each layer of a stage all-gathers its weights before it runs, forward or backward, and
frees them afterwards; the next layer's weights are prefetched meanwhile. Autograd saves views of the full weights, so their storage is
resized while the tensors stay.

A gather writes through tensors that share the weights' storage only, since autograd refuses tensors that were written after they were
saved; the values are those that were saved, because weights change only between steps.

In the field's terms: ZeRO-3 gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.lower.local import LocalStage
from shardwise.run.residency.deferred_gathers import DeferredGathers, LayerId
from shardwise.run.residency.layer_modules import LayeredStage, layers_reading
from shardwise.run.state.parameters import Bucket, FlatGroup
from shardwise.world import private
from shardwise.world.memory import Accounts
from shardwise.world.world import CollectiveWork, Group


@dataclass(eq=False)
class _GatheredBucket:
    """One bucket: this rank's shard, its full weights, and the users that need them."""

    shard: Tensor
    full_weights: Tensor
    group: Group
    size_bytes: int
    users: set[object] = field(default_factory=set)
    work: CollectiveWork | None = None


class WeightGatherer:
    """The sharded buckets of one rank, by the layers that read them."""

    def __init__(self, groups: Sequence[FlatGroup], reduction_groups: Sequence[Group | None], memory: Accounts | None = None) -> None:
        self._memory = memory or Accounts()
        self.deferred, self._is_training_capture = DeferredGathers(), True  # gathers of ZeRO-1 and 2
        self.buckets_by_layer: dict[LayerId, list[_GatheredBucket]] = {}
        self._by_name: dict[str, list[_GatheredBucket]] = {}  # buckets that contain a parameter, by its name
        self._order: dict[int, list[int]] = {}  # the gathering layers of each stage
        self._prefetched: dict[int, list[int]] = {}  # layers that may be prefetched: all ranks of the gather run them
        for group, over in zip(groups, reduction_groups, strict=True):
            if not group.is_gathered:
                continue
            assert over is not None  # a group of one rank does not shard its weights
            for bucket, (_, offset, length) in zip(group.buckets, group.shard_ranges(), strict=True):
                weights = _allocate_bucket(bucket, group.data[offset : offset + length], over)
                for name in bucket.names:
                    self._by_name.setdefault(name, []).append(weights)
                for unit in bucket.layers:
                    self.buckets_by_layer.setdefault(unit, []).append(weights)

    def for_capture(self, stages: Mapping[int, LocalStage], names: Mapping[str, str]) -> WeightGatherer:
        """Return a gatherer of the same weights for the layers of another capture. `names`: of parameters, by graph value."""
        other = WeightGatherer((), (), self._memory)
        other._by_name = self._by_name
        other.deferred, other._is_training_capture = self.deferred, False
        for value, units in layers_reading(stages).items():
            for weights in self._by_name.get(names.get(value, ""), ()):
                for unit in units:
                    if weights not in (buckets := other.buckets_by_layer.setdefault(unit, [])):
                        buckets.append(weights)
        return other

    def wrap(self, stage: int, layered: LayeredStage) -> None:
        """Wrap every layer of a stage that reads sharded weights, so that it gathers them."""
        self._order[stage] = [n for n in sorted(layered.names) if (stage, n) in self.buckets_by_layer]
        self._prefetched[stage] = [n for n in self._order[stage] if n not in layered.in_regions]
        for number in self._order[stage]:
            child = getattr(layered.local.module, layered.names[number])
            setattr(layered.local.module, layered.names[number], GatheredLayer(child, self, (stage, number)))

    def unshard(self, stage: int) -> None:
        """Gather all weights of a stage until `reshard`; of ZeRO-1 and 2, whose gathers are under way, wait for what no layer waits for."""
        self.deferred.begin_stage(stage, self._is_training_capture)
        for number in self._order.get(stage, ()):
            self._start_gather((stage, number), stage)

    def reshard(self, stage: int) -> None:
        """Free a stage's gathered weights."""
        for number in self._order.get(stage, ()):
            self.leave_layer((stage, number), stage)

    def enter_layer(self, layer: LayerId, step: int) -> None:
        """Wait for a layer's weights before it runs, and prefetch those of the next layer in direction `step` (1 or -1). Parallel branches
        are not prefetched: ranks have different layers there, and would gather in different orders."""
        self._start_gather(layer, layer)
        layers = self._prefetched[layer[0]]
        next_index = layers.index(layer[1]) + step if layer[1] in layers else -1
        if 0 <= next_index < len(layers):
            self._start_gather((layer[0], layers[next_index]), (layer[0], layers[next_index]))
        for weights in self.buckets_by_layer[layer]:
            if weights.work is not None:
                weights.work.wait()
                weights.work = None

    def leave_layer(self, layer: LayerId, user: object = None) -> None:
        """Free a layer's weights after it has run, unless they have another user."""
        for weights in self.buckets_by_layer[layer]:
            weights.users.discard(layer if user is None else user)
            if not weights.users and weights.full_weights.untyped_storage().nbytes():
                if weights.work is not None:
                    weights.work.wait()
                    weights.work = None
                weights.full_weights.untyped_storage().resize_(0)

    def release_all(self) -> None:
        """Free all weights at the end of a step, after which shards change, including those that backward did not reach."""
        self.deferred.wait()
        for unit, buckets in self.buckets_by_layer.items():
            for weights in buckets:
                for user in list(weights.users):
                    self.leave_layer(unit, user)

    def _start_gather(self, layer: LayerId, user: object) -> None:
        for weights in self.buckets_by_layer[layer]:
            if not weights.users:
                with self._memory.counting("buffers"):
                    weights.full_weights.untyped_storage().resize_(weights.size_bytes)
                weights.work = weights.group.all_gather_into(weights.full_weights, weights.shard, wait=False)
            weights.users.add(user)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the currently gathered weights."""
        return sum(
            w.full_weights.untyped_storage().nbytes()
            for w in {id(w): w for buckets in self.buckets_by_layer.values() for w in buckets}.values()
        )


def _allocate_bucket(bucket: Bucket, piece: Tensor, over: Group) -> _GatheredBucket:
    assert bucket.gathered_data is not None
    storage = bucket.gathered_data.untyped_storage()
    weights = _GatheredBucket(piece, bucket.gathered_data.data, over, storage.nbytes())  # .data: with a version counter of its own
    storage.resize_(0)
    return weights


class GatheredLayer(nn.Module):
    """A layer that gathers its weights while it runs. Backward gathers at its outputs' gradients and frees at its inputs'."""

    def __init__(self, inner: nn.Module, weights: WeightGatherer, layer: LayerId) -> None:
        super().__init__()
        self.inner, self._weights, self._layer = inner, weights, layer

    def forward(self, *args: Any) -> Any:
        weights, unit = self._weights, self._layer
        weights.enter_layer(unit, 1)
        has_gradients = torch.is_grad_enabled()
        inputs = [i for i, x in enumerate(args) if has_gradients and _requires_grad(x) and not isinstance(x, nn.Parameter)]
        arguments = list(args)
        if inputs:
            for i, x in zip(inputs, _LeaveLayer.apply(weights, unit, *(args[i] for i in inputs)), strict=True):  # type: ignore[no-untyped-call]
                arguments[i] = x
        out = self.inner(*arguments)
        if has_gradients:
            out = _gather_in_backward(out, weights, unit, not inputs)
        weights.leave_layer(unit)
        return out


def _gather_in_backward(out: Any, weights: WeightGatherer, layer: LayerId, frees_after_backward: bool) -> Any:
    """Return `out` with gradients that gather the weights; `frees_after_backward`: no input's gradient frees them."""
    values = list(out) if isinstance(out, tuple | list) else [out]
    idx = [i for i, x in enumerate(values) if _requires_grad(x)]
    if idx:
        for i, x in zip(idx, _EnterLayer.apply(weights, layer, frees_after_backward, *(values[i] for i in idx)), strict=True):  # type: ignore[no-untyped-call]
            values[i] = x
    return type(out)(values) if isinstance(out, tuple | list) else values[0]


def _requires_grad(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _as_views(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.view_as(x) for x in tensors)


class _EnterLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: WeightGatherer, unit: LayerId, alone: bool, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.what = weights, unit, alone
        ctx.set_materialize_grads(False)
        return _as_views(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, unit, alone = ctx.what
        weights.enter_layer(unit, -1)
        if alone:
            private.after_backward(lambda: weights.leave_layer(unit))
        return (None, None, None, *gradients)


class _LeaveLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: WeightGatherer, unit: LayerId, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.what = weights, unit
        ctx.set_materialize_grads(False)
        return _as_views(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, unit = ctx.what
        weights.leave_layer(unit)
        return (None, None, *gradients)
