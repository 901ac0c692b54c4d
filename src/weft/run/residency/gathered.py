"""Weights that lie as pieces and are whole only while a layer uses them: stage 3 of ZeRO (Rajbhandari et al. 2020).

In: flat groups whose `data` are this rank's pieces, a stage cut into layers. Out: the stage, each of whose layers gathers its weights
before it runs, forward or backward, and lets go of them after; the next layer's are on their way meanwhile. Autograd keeps views of the
whole weights, so it is their memory that comes and goes, not the tensors.

A gather writes through tensors that share the weights' memory and nothing else, since autograd refuses what was written after it was
kept; the values are those that it kept, because weights change only between steps.
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

Unit = tuple[int, int]  # stage, layer


@dataclass(eq=False)
class _Weights:
    """One bucket: its piece, its whole, and who needs the whole."""

    piece: Tensor
    full: Tensor
    over: Group
    size_bytes: int
    users: set[object] = field(default_factory=set)
    work: Work | None = None


class Gathered:
    """The buckets of one rank that lie as pieces, by the layers that read them."""

    def __init__(self, groups: Sequence[FlatGroup], sums: Sequence[Group | None], memory: Accounts | None = None) -> None:
        self._memory = memory or Accounts()
        self.units: dict[Unit, list[_Weights]] = {}
        self._by_name: dict[str, list[_Weights]] = {}  # those that have a part of a parameter
        self._order: dict[int, list[int]] = {}  # the layers of each stage
        self._ahead: dict[int, list[int]] = {}  # those that are started on while another runs: all ranks that gather together have them
        for group, over in zip(groups, sums, strict=True):
            if not group.gathered:
                continue
            assert over is not None  # a group of one rank keeps its weights whole
            for bucket, (_, at, length) in zip(group.buckets, group.pieces(), strict=True):
                weights = _weights(bucket, group.data[at : at + length], over)
                for name in bucket.names:
                    self._by_name.setdefault(name, []).append(weights)
                for unit in bucket.units:
                    self.units.setdefault(unit, []).append(weights)

    def read_by(self, stages: Mapping[int, LocalStage], names: Mapping[str, str]) -> Gathered:
        """The same weights as the layers of another capture read them. `names`: of parameters, by graph value."""
        other = Gathered((), (), self._memory)
        other._by_name = self._by_name
        for value, units in layers_of(stages).items():
            for weights in self._by_name.get(names.get(value, ""), ()):
                for unit in units:
                    if weights not in (those := other.units.setdefault(unit, [])):
                        those.append(weights)
        return other

    def wrap(self, stage: int, layered: Layered) -> None:
        """Let every layer of a stage that reads such weights gather them."""
        self._order[stage] = [n for n in sorted(layered.names) if (stage, n) in self.units]
        self._ahead[stage] = [n for n in self._order[stage] if n not in layered.in_regions]
        for number in self._order[stage]:
            child = getattr(layered.local.module, layered.names[number])
            setattr(layered.local.module, layered.names[number], GatheredLayer(child, self, (stage, number)))

    def unshard(self, stage: int) -> None:
        """Gather all weights of a stage, and keep them until `reshard`."""
        for number in self._order.get(stage, ()):
            self._fetch((stage, number), stage)

    def reshard(self, stage: int) -> None:
        """Let go of a stage's weights."""
        for number in self._order.get(stage, ()):
            self.leave((stage, number), stage)

    def enter(self, unit: Unit, step: int) -> None:
        """Before a layer runs: wait for its weights, and start on those of the layer that runs `step` (1 or -1) after it. Among parallel
        branches nothing is started: ranks have different layers there, and would gather in different orders."""
        self._fetch(unit, unit)
        layers = self._ahead[unit[0]]
        after = layers.index(unit[1]) + step if unit[1] in layers else -1
        if 0 <= after < len(layers):
            self._fetch((unit[0], layers[after]), (unit[0], layers[after]))
        for weights in self.units[unit]:
            if weights.work is not None:
                weights.work.wait()
                weights.work = None

    def leave(self, unit: Unit, user: object = None) -> None:
        """After a layer has run: its weights are pieces again, unless someone else needs them."""
        for weights in self.units[unit]:
            weights.users.discard(unit if user is None else user)
            if not weights.users and weights.full.untyped_storage().nbytes():
                if weights.work is not None:
                    weights.work.wait()
                    weights.work = None
                weights.full.untyped_storage().resize_(0)

    def release(self) -> None:
        """At the end of a step, after which the pieces change: nothing is whole, whatever backward did not reach."""
        for unit, those in self.units.items():
            for weights in those:
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
        """Bytes of the weights that are whole now."""
        return sum(w.full.untyped_storage().nbytes() for w in {id(w): w for those in self.units.values() for w in those}.values())


def _weights(bucket: Bucket, piece: Tensor, over: Group) -> _Weights:
    assert bucket.full is not None
    storage = bucket.full.untyped_storage()
    alias = torch.empty(0, dtype=bucket.full.dtype, device=bucket.full.device)
    alias.set_(storage, 0, bucket.full.shape, (1,))
    weights = _Weights(piece, alias, over, storage.nbytes())
    storage.resize_(0)
    return weights


class GatheredLayer(nn.Module):
    """A layer between the moments at which its weights come and go. Backward enters by its outputs' gradients and leaves by its inputs'."""

    def __init__(self, inner: nn.Module, weights: Gathered, unit: Unit) -> None:
        super().__init__()
        self.inner, self._weights, self._unit = inner, weights, unit

    def forward(self, *args: Any) -> Any:
        weights, unit = self._weights, self._unit
        weights.enter(unit, 1)
        learns = torch.is_grad_enabled()
        inputs = [i for i, x in enumerate(args) if learns and _learned(x) and not isinstance(x, nn.Parameter)]
        arguments = list(args)
        if inputs:
            for i, x in zip(inputs, _Leave.apply(weights, unit, *(args[i] for i in inputs)), strict=True):  # type: ignore[no-untyped-call]
                arguments[i] = x
        out = self.inner(*arguments)
        if learns:
            out = _entering(out, weights, unit, not inputs)
        weights.leave(unit)
        return out


def _entering(out: Any, weights: Gathered, unit: Unit, alone: bool) -> Any:
    """`out`, whose gradients bring the weights back; `alone`: no input's gradient lets go of them, so the end of backward does."""
    values = list(out) if isinstance(out, tuple | list) else [out]
    learn = [i for i, x in enumerate(values) if _learned(x)]
    if learn:
        for i, x in zip(learn, _Enter.apply(weights, unit, alone, *(values[i] for i in learn)), strict=True):  # type: ignore[no-untyped-call]
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
