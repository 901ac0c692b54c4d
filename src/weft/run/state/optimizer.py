"""The update of one rank's parameters: an optimizer of torch on flat buffers, clipping by the global norm, ZeRO.

In: flat groups whose gradients are summed. Out: updated parameters. The update rules are torch's own, fused where torch has
them; they are elementwise, so one flat tensor is updated exactly as its parameters would be one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from weft.errors import UsageError, nearest
from weft.run.state.optimizer_kinds import Traits, kinds, options_of, takes, traits
from weft.run.state.parameters import FlatGroup
from weft.run.state.precision import LossScale
from weft.world.world import Group

_EPS = 1e-8
SHARED_BYTES = 64 << 10  # of state that is worth telling that other ranks hold it, too


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Which optimizer of `torch.optim`, in lower case, with torch's defaults. `clip`: largest global gradient norm (0 = none).

    `options`: more that it is made with, as pairs of name and value.

    `decay`: "all" parameters as torch.optim does, or "matrices" (two dimensions or more) as language models are trained.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float | None = None  # torch's default: 0.01 for AdamW, 0 for SGD
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = _EPS
    momentum: float = 0.0
    clip: float = 0.0
    decay: str = "all"
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if not self.usual and self.name not in kinds():
            raise UsageError(
                f"optimizer {self.name!r} is unknown{nearest(self.name, tuple(kinds()), 0.6)}; use adamw, sgd, or another of torch.optim: "
                f"{', '.join(sorted(kinds()))}"
            )
        if self.decay not in ("all", "matrices"):
            raise UsageError(f"decay={self.decay!r} is unknown; use all or matrices")
        if self.lr < 0 or self.clip < 0:
            raise UsageError(f"lr={self.lr} and clip={self.clip} must not be negative")

    @classmethod
    def of(cls, value: OptimizerSpec | str | Mapping[str, Any]) -> OptimizerSpec:
        """A name, a mapping of fields, or a spec. Raises UsageError for an unknown field."""
        if isinstance(value, OptimizerSpec):
            return value
        if isinstance(value, str):
            return cls(value)
        names = [f.name for f in fields(cls)]
        for key in value:
            if key not in names:
                raise UsageError(f"optimizer option {key!r} is unknown{nearest(key, names, 0.6)}; known: {', '.join(names)}")
        more = value.get("options", ())
        return cls(**{**value, "options": tuple(sorted(more.items())) if isinstance(more, Mapping) else more})

    @property
    def usual(self) -> bool:
        """Whether it is one of the two whose state is zeros before the first step, and of known names."""
        return self.name in ("adamw", "sgd") and not self.options

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors.

        Raises:
            UsageError: an optimizer that cannot update pieces of parameters.
        """
        if not self.usual:
            return traits_of(self).slots
        return ("exp_avg", "exp_avg_sq") if self.name == "adamw" else ("momentum_buffer",) if self.momentum else ()

    @property
    def gain(self) -> float:
        """Of AdamW, how much further at most a step moves a weight whose gradients, far below `eps`, differ by one: lr / eps, since it
        moves by lr m / (sqrt(v) + eps), m an average of them (Kingma and Ba 2015). 0 of others, of which nothing is said."""
        return self.lr / self.eps if self.name == "adamw" and self.usual and self.eps else 0.0

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of numbers that the optimizer counts with, beside the steps."""
        return () if self.usual else traits_of(self).scalars

    def build(self, tensors: Sequence[tuple[Tensor, bool]]) -> torch.optim.Optimizer:
        """torch's optimizer over (tensor, does it decay) pairs; also what the serial reference uses."""
        default = 0.01 if self.name == "adamw" else 0.0
        decay = default if self.weight_decay is None else self.weight_decay
        # A stage may have no parameters; torch wants one.
        params = [{"params": [t], "weight_decay": decay if decays else 0.0} for t, decays in tensors or [(torch.zeros(0), False)]]
        fused = not any(t.is_complex() for t, _ in tensors)  # torch has none for complex numbers
        if not self.usual:
            return self._other(params, fused)
        if self.name == "adamw":
            return torch.optim.AdamW(params, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, fused=fused)

    def _other(self, params: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        kind = kinds()[self.name]
        options = takes(kind)
        if self.momentum and "momentum" not in options:
            raise UsageError(f"optimizer {self.name} has no momentum, and momentum={self.momentum:g}; set it to 0")
        if "weight_decay" not in options:
            if self.weight_decay:
                raise UsageError(f"optimizer {self.name} has no weight decay, and weight_decay={self.weight_decay:g}; set it to 0")
            params = [{"params": entry["params"]} for entry in params]
        chosen: dict[str, Any] = {"betas": self.betas, "momentum": self.momentum}
        if self.eps != _EPS:
            chosen["eps"] = self.eps
        if "foreach" not in dict(self.options):
            chosen["fused"] = fused
        chosen = {name: value for name, value in chosen.items() if name in options}
        try:
            return kind(params, lr=self.lr, **chosen | options_of(kind, self.name, dict(self.options)))  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            if not self.options:
                raise
            raise UsageError(f"optimizer {self.name} cannot be made with {dict(self.options)}: {error}") from error

    def decays(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape decays."""
        return self.decay == "all" or len(shape) > 1


@cache
def traits_of(spec: OptimizerSpec) -> Traits:
    """What an optimizer keeps. Raises UsageError where it cannot update pieces of parameters."""
    return traits(spec.name, spec.build)


class Optimizer:
    """Updates flat groups, whole or (ZeRO) this rank's piece of every bucket, where they lie.

    With `offload` its state and its own copy of the weights lie on the host, and the update runs there (Ren et al. 2021).
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        groups: Sequence[FlatGroup],
        sums: Sequence[Group | None],
        world: Group,
        sharded: bool,
        offload: bool = False,
        alone: bool = False,
        scale: LossScale | None = None,
    ) -> None:
        """`alone`: every replica has all gradients, and `world` is its ranks, so none asks another for the norm. `scale`: of the loss."""
        self.scale = scale if scale is not None and scale.scaled else None
        self.spec, self._groups, self._sums, self._world = spec, list(groups), list(sums), world
        self.sharded = [sharded and over is not None and over.size > 1 for over in self._sums]
        self.offload, self._alone = offload, alone
        # By group and piece: where the device has it, and what is updated.
        self._there = [list(zip(*self._views(number), strict=True)) for number in range(len(self._groups))]
        self._mine = [[(_host(p), _host(g)) if offload else (p, g) for p, g in those] for those in self._there]
        decays = [group.decay for group in self._groups]
        updated = [(p, decay) for those, decay in zip(self._mine, decays, strict=True) for p, _ in those]
        # A parameter of no use, whose numbers a rank without parameters has too.
        self._clock = [] if spec.usual else [torch.zeros(1)]
        self.inner = spec.build([*updated, *((p, False) for p in self._clock)])
        # State is there from the start, so that a checkpoint can be loaded into it; zeros are what the first step would make of the usual
        # ones. What others begin with their first step makes, and it is laid into the tensors that are there.
        self._first: dict[Tensor, dict[str, Any]] = {}
        self.counters = {} if spec.usual else {"optimizer.updates": torch.zeros((), dtype=torch.int64)}
        for p in (*(p for p, _ in updated), *self._clock):
            state: dict[str, Tensor] = {slot: torch.zeros_like(p) for slot in spec.slots}
            if spec.name == "adamw" and spec.usual:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            if not spec.usual:
                self._first[p] = dict(self.inner.state.get(p, {}))
                state |= {name: torch.zeros((), dtype=torch.float32, device=p.device) for name in spec.scalars}
            self.inner.state[p] = state
        self.counters |= {f"optimizer.{name}": self.inner.state[p][name] for p in self._clock for name in spec.scalars}

    def _views(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Parameters and gradients of this rank's pieces of a group, where the group has them."""
        group = self._groups[number]
        places = self.pieces(number)
        params = [group.data.narrow(0, at if group.gathered else start, length) for start, at, length in places]
        if group.comes_and_goes:
            buckets = zip(group.buckets, places, strict=True)
            return params, [group.gradients(bucket).narrow(0, start - bucket.start, length) for bucket, (start, _, length) in buckets]
        return params, [group.grad.narrow(0, at if group.scattered else start, length) for start, at, length in places]

    def state_tensors(self) -> list[Tensor]:
        """Everything that the optimizer holds beside the groups' own parameters and gradients."""
        copies = [t for those in self._mine for pair in those for t in pair] if self.offload else []
        return [*copies, *self._numbers(), *self.updates]

    def state_of_update(self) -> list[Tensor]:
        """What only updates change: parameters, but those that the model itself writes, and all that the optimizer holds."""
        groups = [group.data for group in self._groups if not group.members[0].written]
        return [*groups, *(t for those in self._mine for t, _ in those if self.offload), *self._numbers()]

    def _numbers(self) -> Iterator[Tensor]:
        return (t for state in self.inner.state.values() for t in state.values() if isinstance(t, Tensor))

    def owner_of(self, x: Tensor, element: int) -> tuple[str, str]:
        """(parameter, slot, or nothing for a copy of its weights) that an element of a tensor of the state is of; empty where of none."""
        for number, group in enumerate(self._groups):
            for (p, _), (start, _, _) in zip(self._mine[number], self.pieces(number), strict=True):
                slots = {id(p): "", **{id(t): slot for slot, t in self.inner.state[p].items()}}
                if id(x) in slots and x.numel() == p.numel():
                    placed = zip(group.starts, group.members, strict=True)
                    return next((m.name for at, m in placed if at <= start + element < at + m.size), ""), slots[id(x)]
        return "", ""

    def shared_by(self) -> dict[int, tuple[int, ...]]:
        """Which ranks hold the same of its state tensors, by id: those that update the same parameters from the same sums."""
        return {
            id(x): group.sum_ranks
            for number, group in enumerate(self._groups)
            if group.shards == 1 and len(group.sum_ranks) > 1
            for p, _ in self._mine[number]
            for x in (*self.inner.state[p].values(), *([p] if self.offload else []))
            if isinstance(x, Tensor) and x.nbytes >= SHARED_BYTES
        }

    def read(self, gradients: Sequence[Tensor]) -> None:
        """Take gradients from these from now on, one flat tensor a group; where groups have whole gradients, and are updated here."""
        for number, gradient in enumerate(gradients):
            places = zip(self._mine[number], self.pieces(number), strict=True)
            self._mine[number] = [(p, gradient.narrow(0, start, length)) for (p, _), (start, _, length) in places]

    def slots(self, number: int) -> list[dict[str, Tensor]]:
        """The optimizer's state tensors of group `number`, by piece as in `pieces(number)`."""
        return [{slot: self.inner.state[p][slot] for slot in self.spec.slots} for p, _ in self._mine[number]]

    @property
    def updates(self) -> list[Tensor]:
        """How many updates were made, where the first is another than the rest."""
        return [x for name, x in self.counters.items() if name == "optimizer.updates"]

    def set_steps(self, count: int) -> None:
        """Steps that the state has seen (AdamW's bias correction); what `counters` hold of others is theirs."""
        for state in self.inner.state.values():
            for name in self.spec.scalars:
                state[name].copy_(self.counters[f"optimizer.{name}"])
            if not self.spec.usual:
                continue
            if "step" in state:
                state["step"].fill_(float(count))

    def pieces(self, number: int) -> list[tuple[int, int, int]]:
        """(start in the flat group, start in its pieces one after the other, length) of what this rank updates of group `number`."""
        group = self._groups[number]
        return group.pieces() if self.sharded[number] or group.comes_and_goes else [(0, 0, group.data.numel())]

    def load_parameters(self) -> None:
        """After parameters were written from outside (initial values, a checkpoint): take them over, where they have a copy here."""
        if self.offload:
            for there, mine in zip(self._there, self._mine, strict=True):
                for (source, _), (target, _) in zip(there, mine, strict=True):
                    target.copy_(source)

    def step(self, lr: float | None = None) -> float | None:
        """Clip, update, and (ZeRO-1 and 2) gather the parameters. Returns the global gradient norm where it was needed.

        Where a loss is scaled and any rank's gradients are not finite, nothing is updated, and there is no norm.
        """
        for group in self._groups:
            group.hold()  # also where no step has been made
        if self.offload:
            for group, there, mine in zip(self._groups, self._there, self._mine, strict=True):
                for (weights, source), (copy, target) in zip(there, mine, strict=True):
                    target.copy_(source)
                    if group.members[0].written:
                        copy.copy_(weights)
        norm = self._clip() if self.spec.clip else None
        if self.scale is not None and self._overflowed(norm):
            return None
        for entry in self.inner.param_groups:
            if lr is not None:
                entry["lr"] = lr
        for those in self._mine:
            for p, g in those:
                p.grad = g
        self._update()
        self._hand_out()
        return norm

    def _update(self) -> None:
        for p in self._clock:
            p.grad = torch.zeros_like(p)
        begins = any(not count for count in self.updates)
        there = dict(self.inner.state)
        if begins:
            for p, state in self._first.items():
                self.inner.state[p] = {name: x.clone() if isinstance(x, Tensor) else x for name, x in state.items()}
        self.inner.step()
        if begins:
            for p, state in there.items():
                for name, x in state.items():
                    x.copy_(self.inner.state[p][name])
                self.inner.state[p] = state
        for count in self.updates:
            count += 1

    def _hand_out(self) -> None:
        """Bring updated weights to the device, and (ZeRO-1 and 2) to the other ranks."""
        works = []
        for number, group in enumerate(self._groups):
            over = self._sums[number]
            if self.offload:
                for (target, _), (source, _) in zip(self._there[number], self._mine[number], strict=True):
                    target.copy_(source)
            if self.sharded[number] and over is not None and not group.gathered:
                for (piece, _), bucket in zip(self._there[number], group.buckets, strict=True):
                    works.append(over.all_gather_into(group.data[bucket.start : bucket.stop], piece, wait=False))
        for work in works:
            work.wait()

    def unscale(self) -> None:
        """Make summed gradients those of the loss that was not scaled."""
        if self.scale is not None:
            self.scale.unscale([g for those in self._there for _, g in those])

    def _overflowed(self, norm: float | None) -> bool:
        """Whether any rank has gradients that are not finite, as `norm` tells where there is one; ends the scale's step."""
        assert self.scale is not None
        if norm is None:
            self._world.all_reduce(self.scale.overflowed, op="max")
            norm = inf if self.scale.overflowed else 0.0
        self.scale.update(not isfinite(norm))
        return not isfinite(norm)

    def norm(self) -> float:
        """The norm of all gradients of the whole model, each element counted once."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for number, group in enumerate(self._groups):
            # A piece is counted by its owner; what is whole on many ranks is counted by the first of them.
            if group.counted_piece if self._alone or self.sharded[number] else group.counted:
                for _, g in self._mine[number]:
                    total += (torch.linalg.vector_norm(g).double() ** 2).to(total.device)
        self._world.all_reduce(total)
        return float(total.sqrt())

    def _clip(self) -> float:
        norm = self.norm()
        if not norm <= self.spec.clip:  # what is not a number makes all gradients so, as torch's clipping does
            scale = self.spec.clip / (norm + 1e-6)
            for those in self._mine:
                for _, g in those:
                    g.mul_(scale)
        return norm


def _host(x: Tensor) -> Tensor:
    """Room for a tensor on the host."""
    return torch.zeros(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda")
