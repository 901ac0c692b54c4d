"""All-gather of sharded weights layer by layer: stage 3 of ZeRO (Rajbhandari et al. 2020), also known as fully sharded data parallelism.

The `data` of flat groups are this rank's shards. Each layer of a stage all-gathers its weights before it runs, forward or backward, and
frees them afterwards; the next layer's weights are prefetched meanwhile. Autograd saves views of the full weights, so their storage is
resized while the tensors stay.

A gather writes through tensors that share the weights' storage only, since autograd refuses tensors that were written after they were
saved; the values are those that were saved, because weights change only between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.lower.local import LocalStage
from weft.run.residency.layer_modules import Layered, layers_of
from weft.run.state.parameters import Bucket, FlatGroup
from weft.world import private
from weft.world.memory import Accounts
from weft.world.world import Group, Work

Unit = tuple[int, int]  # stage, number of the layer


@dataclass(eq=False)
class _Weights:
    """One bucket: this rank's shard, its full weights, and the users that need them."""

    piece: Tensor
    full: Tensor
    over: Group
    size_bytes: int
    users: set[object] = field(default_factory=set)
    work: Work | None = None


class Gathered:
    """The sharded buckets of one rank, by the layers that read them."""

    def __init__(self, groups: Sequence[FlatGroup], sums: Sequence[Group | None], memory: Accounts | None = None) -> None:
        self._memory = memory or Accounts()
        self.units: dict[Unit, list[_Weights]] = {}
        self._by_name: dict[str, list[_Weights]] = {}  # buckets that contain a parameter, by its name
        self._order: dict[int, list[int]] = {}  # the gathering layers of each stage
        self._ahead: dict[int, list[int]] = {}  # layers that may be prefetched: all ranks of the gather run them
        for group, over in zip(groups, sums, strict=True):
            if not group.gathered:
                continue
            assert over is not None  # a group of one rank does not shard its weights
            for bucket, (_, offset, length) in zip(group.buckets, group.pieces(), strict=True):
                weights = _weights(bucket, group.data[offset : offset + length], over)
                for name in bucket.names:
                    self._by_name.setdefault(name, []).append(weights)
                for unit in bucket.units:
                    self.units.setdefault(unit, []).append(weights)

    def read_by(self, stages: Mapping[int, LocalStage], names: Mapping[str, str]) -> Gathered:
        """Return a gatherer of the same weights for the layers of another capture. `names`: of parameters, by graph value."""
        other = Gathered((), (), self._memory)
        other._by_name = self._by_name
        for value, units in layers_of(stages).items():
            for weights in self._by_name.get(names.get(value, ""), ()):
                for unit in units:
                    if weights not in (buckets := other.units.setdefault(unit, [])):
                        buckets.append(weights)
        return other

    def wrap(self, stage: int, layered: Layered) -> None:
        """Wrap every layer of a stage that reads sharded weights, so that it gathers them."""
        self._order[stage] = [n for n in sorted(layered.names) if (stage, n) in self.units]
        self._ahead[stage] = [n for n in self._order[stage] if n not in layered.in_regions]
        for number in self._order[stage]:
            child = getattr(layered.local.module, layered.names[number])
            setattr(layered.local.module, layered.names[number], GatheredLayer(child, self, (stage, number)))

    def unshard(self, stage: int) -> None:
        """Gather all weights of a stage until `reshard`."""
        for number in self._order.get(stage, ()):
            self._fetch((stage, number), stage)

    def reshard(self, stage: int) -> None:
        """Free a stage's gathered weights."""
        for number in self._order.get(stage, ()):
            self.leave((stage, number), stage)

    def enter(self, unit: Unit, step: int) -> None:
        """Wait for a layer's weights before it runs, and prefetch those of the next layer in direction `step` (1 or -1). Parallel branches
        are not prefetched: ranks have different layers there, and would gather in different orders."""
        self._fetch(unit, unit)
        layers = self._ahead[unit[0]]
        next_index = layers.index(unit[1]) + step if unit[1] in layers else -1
        if 0 <= next_index < len(layers):
            self._fetch((unit[0], layers[next_index]), (unit[0], layers[next_index]))
        for weights in self.units[unit]:
            if weights.work is not None:
                weights.work.wait()
                weights.work = None

    def leave(self, unit: Unit, user: object = None) -> None:
        """Free a layer's weights after it has run, unless they have another user."""
        for weights in self.units[unit]:
            weights.users.discard(unit if user is None else user)
            if not weights.users and weights.full.untyped_storage().nbytes():
                if weights.work is not None:
                    weights.work.wait()
                    weights.work = None
                weights.full.untyped_storage().resize_(0)

    def release(self) -> None:
        """Free all weights at the end of a step, after which shards change, including those that backward did not reach."""
        for unit, buckets in self.units.items():
            for weights in buckets:
                for user in list(weights.users):
                    self.leave(unit, user)

    def _fetch(self, unit: Unit, user: object) -> None:
        for weights in self.units[unit]:
            if not weights.users:
                with self._memory.counting("buffers"):
                    weights.full.untyped_storage().resize_(weights.size_bytes)
                weights.work = weights.over.all_gather_into(weights.full, weights.piece, wait=False)
            weights.users.add(user)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the currently gathered weights."""
        return sum(w.full.untyped_storage().nbytes() for w in {id(w): w for buckets in self.units.values() for w in buckets}.values())


def _weights(bucket: Bucket, piece: Tensor, over: Group) -> _Weights:
    assert bucket.full is not None
    storage = bucket.full.untyped_storage()
    alias = torch.empty(0, dtype=bucket.full.dtype, device=bucket.full.device)
    alias.set_(storage, 0, bucket.full.shape, (1,))
    weights = _Weights(piece, alias, over, storage.nbytes())
    storage.resize_(0)
    return weights


class GatheredLayer(nn.Module):
    """A layer that gathers its weights while it runs. Backward gathers at its outputs' gradients and frees at its inputs'."""

    def __init__(self, inner: nn.Module, weights: Gathered, unit: Unit) -> None:
        super().__init__()
        self.inner, self._weights, self._unit = inner, weights, unit

    def forward(self, *args: Any) -> Any:
        weights, unit = self._weights, self._unit
        weights.enter(unit, 1)
        has_gradients = torch.is_grad_enabled()
        inputs = [i for i, x in enumerate(args) if has_gradients and _learned(x) and not isinstance(x, nn.Parameter)]
        arguments = list(args)
        if inputs:
            for i, x in zip(inputs, _Leave.apply(weights, unit, *(args[i] for i in inputs)), strict=True):  # type: ignore[no-untyped-call]
                arguments[i] = x
        out = self.inner(*arguments)
        if has_gradients:
            out = _entering(out, weights, unit, not inputs)
        weights.leave(unit)
        return out


def _entering(out: Any, weights: Gathered, unit: Unit, alone: bool) -> Any:
    """Return `out` with gradients that gather the weights; `frees_after_backward`: no input's gradient frees them."""
    values = list(out) if isinstance(out, tuple | list) else [out]
    idx = [i for i, x in enumerate(values) if _learned(x)]
    if idx:
        for i, x in zip(idx, _Enter.apply(weights, unit, alone, *(values[i] for i in idx)), strict=True):  # type: ignore[no-untyped-call]
            values[i] = x
    return type(out)(values) if isinstance(out, tuple | list) else values[0]


def _learned(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _unchanged(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.view_as(x) for x in tensors)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Gathered, unit: Unit, alone: bool, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.what = weights, unit, alone
        ctx.set_materialize_grads(False)
        return _unchanged(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, unit, alone = ctx.what
        weights.enter(unit, -1)
        if alone:
            private.after_backward(lambda: weights.leave(unit))
        return (None, None, None, *gradients)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Gathered, unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.what = weights, unit
        ctx.set_materialize_grads(False)
        return _unchanged(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        weights, unit = ctx.what
        weights.leave(unit)
        return (None, None, *gradients)
