"""Optimizer step on one rank's parameters: a torch optimizer on flat buffers, gradient clipping by the global norm, ZeRO, offload.

In: flat groups with reduced gradients. Out: updated parameters. The update rules are torch's own, fused if available; they are
elementwise, so a flat tensor is updated as its parameters would be one by one, to a unit in the last place of a tensor's last elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UsageError, did_you_mean
from shardwise.run.state.inner_update import InnerUpdate
from shardwise.run.state.optimizer_kinds import OptimizerTraits, check_options, measure_traits, optimizer_classes, option_names
from shardwise.run.state.parameters import FlatGroup, UpdatedSegment, gather_order, host_buffer
from shardwise.run.state.precision import LossScale
from shardwise.world.world import CollectiveWork, Group

_EPS = 1e-8
MIN_REPLICATED_BYTES = 64 << 10  # of state that is worth sharding over replicas in snapshots


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Optimizer of `torch.optim` by lower-case name, with torch's defaults. `clip`: maximum global gradient norm (0 = none).

    `options`: further constructor options, as (name, value) pairs. `decay`: weight decay of "all" parameters as in torch.optim, or of
    "matrices" (two dimensions or more) as for language models.
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
        if not self.is_standard and self.name not in optimizer_classes():
            raise UsageError(
                f"optimizer {self.name!r} is unknown{did_you_mean(self.name, tuple(optimizer_classes()), 0.6)}; use adamw, sgd, or "
                f"another of torch.optim: {', '.join(sorted(optimizer_classes()))}"
            )
        if self.decay not in ("all", "matrices"):
            raise UsageError(f"decay={self.decay!r} is unknown; use all or matrices")
        if self.lr < 0 or self.clip < 0:
            raise UsageError(f"lr={self.lr} and clip={self.clip} must not be negative")

    @classmethod
    def of(cls, value: OptimizerSpec | str | Mapping[str, Any]) -> OptimizerSpec:
        """Parse a name, a mapping of fields, or a spec. Raises UsageError for an unknown field."""
        if isinstance(value, OptimizerSpec):
            return value
        if isinstance(value, str):
            return cls(value)
        names = [f.name for f in fields(cls)]
        for key in value:
            if key not in names:
                raise UsageError(f"optimizer option {key!r} is unknown{did_you_mean(key, names, 0.6)}; known: {', '.join(names)}")
        options = value.get("options", ())
        return cls(**{**value, "options": tuple(sorted(options.items())) if isinstance(options, Mapping) else options})

    @property
    def is_standard(self) -> bool:
        """Return whether it is adamw or sgd without options, whose state is known and zero before the first step."""
        return self.name in ("adamw", "sgd") and not self.options

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the optimizer's state tensors.

        Raises:
            UsageError: an optimizer that cannot update shards of parameters.
        """
        if not self.is_standard:
            return traits_of(self).slots
        return ("exp_avg", "exp_avg_sq") if self.name == "adamw" else ("momentum_buffer",) if self.momentum else ()

    @property
    def rounding_gain(self) -> float:
        """Sensitivity of an AdamW update to gradients far below `eps`: lr / eps, since the step is lr m / (sqrt(v) + eps) with m a mean of
        gradients (Kingma and Ba 2015). 0, unknown, for other optimizers."""
        return self.lr / self.eps if self.name == "adamw" and self.is_standard and self.eps else 0.0

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the optimizer's scalar state, other than the step count."""
        return () if self.is_standard else traits_of(self).scalars

    def build(self, tensors: Sequence[tuple[Tensor, bool]]) -> torch.optim.Optimizer:
        """Build the torch optimizer over (tensor, has weight decay) pairs; the serial reference uses it too."""
        default = 0.01 if self.name == "adamw" else 0.0
        decay = default if self.weight_decay is None else self.weight_decay
        # A stage may have no parameters, but torch needs one.
        params = [{"params": [t], "weight_decay": decay if decays else 0.0} for t, decays in tensors or [(torch.zeros(0), False)]]
        fused = not any(t.is_complex() for t, _ in tensors)  # torch has no fused update of complex numbers
        if not self.is_standard:
            return self._build_from_class(params, fused)
        if self.name == "adamw":
            return torch.optim.AdamW(params, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum, fused=fused)

    def _build_from_class(self, params: list[dict[str, Any]], fused: bool) -> torch.optim.Optimizer:
        kind = optimizer_classes()[self.name]
        options = option_names(kind)
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
            return kind(params, lr=self.lr, **chosen | check_options(kind, self.name, dict(self.options)))  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            if not self.options:
                raise
            raise UsageError(f"optimizer {self.name} cannot be made with {dict(self.options)}: {error}") from error

    def decays(self, shape: Sequence[int]) -> bool:
        """Return whether a parameter of this shape has weight decay."""
        return self.decay == "all" or len(shape) > 1


@cache
def traits_of(spec: OptimizerSpec) -> OptimizerTraits:
    """Return the state tensors of an optimizer. Raises UsageError if it cannot update shards of parameters."""
    return measure_traits(spec.name, spec.build)


class Optimizer:
    """Updates flat groups in place, in full or (ZeRO) this rank's shard of every bucket.

    Groups with `main` weights are updated there, and `data` is a copy with fewer bits.
    With `offload` its state and its own copy of the weights are on the host, and the update runs there (Ren et al. 2021).
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        groups: Sequence[FlatGroup],
        reduction_groups: Sequence[Group | None],
        world: Group,
        uses_zero: bool,
        offload: bool = False,
        has_whole_replica: bool = False,
        loss_scale: LossScale | None = None,
    ) -> None:
        """`has_whole_replica`: every replica has all gradients, and `world` is the replica's ranks, over which the norm is reduced."""
        self.scale = loss_scale if loss_scale is not None and loss_scale.is_scaled else None
        self.spec, self._groups, self._reduction_groups, self._world = spec, list(groups), list(reduction_groups), world
        self.is_sharded = [uses_zero and over is not None and over.size > 1 for over in self._reduction_groups]
        self.offload, self._has_whole_replica = offload, has_whole_replica
        self.defer_gather: Callable[[tuple[int, int], Group, CollectiveWork], bool] = lambda bucket, over, work: False
        self._gather_order = [place for place in gather_order(self._groups) if self._is_gathered_after_update(place[0])]
        self.clips_on_device = world.device.type != "cpu" and not offload  # the host reads no norm; gradients are scaled in every step
        # By group and shard: (parameter, gradient) on the device, and those that are updated (on the host with offload).
        self._on_device = [list(zip(*self._views(number), strict=True)) for number in range(len(self._groups))]
        self._updated = [[(host_buffer(p), host_buffer(g)) if offload else (p, g) for p, g in pairs] for pairs in self._on_device]
        for number, group in enumerate(self._groups):
            if group.main is not None:
                group.main = host_buffer(group.main).copy_(group.main) if offload else group.main
                ranges = zip(self.shard_ranges(number), self._updated[number], strict=True)
                self._updated[number] = [(group.main.narrow(0, at, length), g) for (_, at, length), (_, g) in ranges]
        self._narrow_gradients = [any(p.dtype != g.dtype for p, g in pairs) for pairs in self._updated]
        parameters = [(p, group.has_weight_decay) for pairs, group in zip(self._updated, self._groups, strict=True) for p, _ in pairs]
        # A placeholder parameter, so that ranks without parameters have the scalar state too.
        self._placeholder = [] if spec.is_standard else [torch.zeros(1)]
        self.inner = spec.build([*parameters, *((p, False) for p in self._placeholder)])
        self._inner_update = InnerUpdate(self.inner)
        # State is allocated from the start, to load checkpoints into; zeros are the initial state of standard optimizers. Others initialise
        # it in their first step, after which it is copied into the allocated tensors.
        self._initial_state: dict[Tensor, dict[str, Any]] = {}
        self.counters = {} if spec.is_standard else {"optimizer.updates": torch.zeros((), dtype=torch.int64)}
        for p in (*(p for p, _ in parameters), *self._placeholder):
            state: dict[str, Tensor] = {slot: torch.zeros_like(p) for slot in spec.slots}
            if spec.name == "adamw" and spec.is_standard:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            if not spec.is_standard:
                self._initial_state[p] = dict(self.inner.state.get(p, {}))
                state |= {name: torch.zeros((), dtype=torch.float32, device=p.device) for name in spec.scalars}
            self.inner.state[p] = state
        self.counters |= {f"optimizer.{name}": self.inner.state[p][name] for p in self._placeholder for name in spec.scalars}
        self._segments: dict[Tensor, list[UpdatedSegment]] = {}
        self._skips: dict[str, Tensor] = {}  # numbers of updates that left a parameter alone, by its name
        self._skippable_placeholders: dict[str, Tensor] = {}  # so that every rank has the scalar state of every such parameter
        self._skipped: frozenset[str] = frozenset()
        self._split_names: frozenset[str] = frozenset()
        self._initialized: set[Tensor] = set()

    def _views(self, number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the parameters and gradients of this rank's shards of a group."""
        group = self._groups[number]
        ranges = self.shard_ranges(number)
        params = [group.data.narrow(0, shard_start if group.is_gathered else start, length) for start, shard_start, length in ranges]
        if group.is_allocated_per_bucket:
            buckets = zip(group.buckets, ranges, strict=True)
            return params, [group.bucket_gradient(bucket).narrow(0, start - bucket.start, length) for bucket, (start, _, length) in buckets]
        return params, [group.grad.narrow(0, shard_start if group.is_scattered else start, length) for start, shard_start, length in ranges]

    def state_tensors(self) -> list[Tensor]:
        """Return all tensors of the optimizer other than the groups' own parameters and gradients."""
        copies = (t for pairs in self._updated for pair in pairs for t in pair if self.offload)
        return [*copies, *self._main_weights(), *self._inner_state(), *self.update_counts]

    def state_changed_by_update(self) -> list[Tensor]:
        """Return what only updates change: optimizer state, and parameters other than those that the model itself writes."""
        groups = [group.data for group in self._groups if not group.members[0].is_written_by_model]
        return [*groups, *(t for pairs in self._updated for t, _ in pairs if self.offload), *self._main_weights(), *self._inner_state()]

    def _main_weights(self) -> list[Tensor]:
        """Return the main weights on the device."""
        return [p for n, group in enumerate(self._groups) if group.main is not None and not self.offload for p, _ in self._updated[n]]

    def _inner_state(self) -> Iterator[Tensor]:
        return (t for state in self.inner.state.values() for t in state.values() if isinstance(t, Tensor))

    def owner_of(self, x: Tensor, element: int) -> tuple[str, str]:
        """Return (parameter, slot) of an element of a state tensor; slot "" for a copy of the weights; both empty if of none."""
        for number, group in enumerate(self._groups):
            for (p, _), (start, _, _) in zip(self._updated[number], self.shard_ranges(number), strict=True):
                slots = {id(p): "", **{id(t): slot for slot, t in self.inner.state[p].items()}}
                if id(x) in slots and x.numel() == p.numel():
                    members = zip(group.starts, group.members, strict=True)
                    return next((m.name for at, m in members if at <= start + element < at + m.size), ""), slots[id(x)]
        return "", ""

    def replicated_on(self) -> dict[int, tuple[int, ...]]:
        """Return the replicas of each state tensor by id: the ranks that update the same parameters from the same gradients."""
        return {
            id(x): group.sum_ranks
            for number, group in enumerate(self._groups)
            if group.num_shards == 1 and len(group.sum_ranks) > 1
            for p, _ in self._updated[number]
            for x in (*self.inner.state[p].values(), *([p] if self.offload or group.main is not None else []))
            if isinstance(x, Tensor) and x.nbytes >= MIN_REPLICATED_BYTES
        }

    def use_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Use these flat gradients from now on, one per group; only for groups with full gradients that are updated on the device."""
        for number, gradient in enumerate(gradients):
            places = zip(self._updated[number], self.shard_ranges(number), strict=True)
            self._updated[number] = [(p, gradient.narrow(0, start, length)) for (p, _), (start, _, length) in places]
        self._inner_update.unbind()

    def slots(self, number: int) -> list[dict[str, Tensor]]:
        """Return the state tensors of group `number` by slot, for each shard of `shard_ranges(number)`."""
        return [{slot: self.inner.state[p][slot] for slot in self.spec.slots} for p, _ in self._updated[number]]

    @property
    def update_counts(self) -> list[Tensor]:
        """Number of updates, for optimizers that initialise state in the first one."""
        return [x for name, x in self.counters.items() if name == "optimizer.updates"]

    def set_steps(self, count: int) -> None:
        """Set the step count of the state (AdamW's bias correction); other optimizers take theirs from `counters`. After a load."""
        self._initialized = set(self._initial_state) if any(self.update_counts) else set()
        for state in self.inner.state.values():
            for name in self.spec.scalars:
                state[name].copy_(self.counters[f"optimizer.{name}"])
            if self.spec.is_standard and "step" in state:
                state["step"].fill_(float(count))

    def shard_ranges(self, number: int) -> list[tuple[int, int, int]]:
        """Return (start in the flat group, start in the concatenated shards, length) of what this rank updates of group `number`."""
        group = self._groups[number]
        return group.shard_ranges() if self.is_sharded[number] or group.is_allocated_per_bucket else [(0, 0, group.data.numel())]

    def after_load(self) -> None:
        """Finish loading the weights of a checkpoint: those with fewer bits follow from the main weights. Every rank calls it."""
        if any(group.main is not None for group in self._groups):
            self._distribute_weights()
        self.load_parameters()

    def load_parameters(self) -> None:
        """Copy parameters that were written from outside (initial values, a checkpoint) to the host copy, with offload."""
        for number, group in enumerate(self._groups):
            if self.offload and group.main is None:
                for (source, _), (target, _) in zip(self._on_device[number], self._updated[number], strict=True):
                    target.copy_(source)

    def skip_parameters(self, names: frozenset[str]) -> None:
        """Leave these parameters, and their state, alone in the next steps: they have no gradient, as torch's optimizers do."""
        self._skipped = names
        self._inner_update.unbind()
        if names <= self._split_names:
            return
        for name in names - self._split_names:
            self._skips[name] = torch.zeros((), dtype=torch.int64)
            self._add_skippable_placeholder(name)
        self._split_names |= names
        for number, pairs in enumerate(self._updated):
            for (p, _), (start, _, length) in zip(pairs, self.shard_ranges(number), strict=True):
                self._split(p, self._groups[number].segment_bounds(start, length, self._split_names))

    def _split(self, p: Tensor, bounds: Sequence[tuple[int, int, str]]) -> None:
        """Update a flat tensor in segments, each with a state of its own: views of the tensor's, and counts."""
        before = self._segments.get(p) or [UpdatedSegment(0, "", p)]
        if not any(name for _, _, name in bounds):
            return
        segments = []
        for start, length, name in bounds:
            source = next(one for one in reversed(before) if one.start <= start)
            segment, whole = p.narrow(0, start, length), self.inner.state[p]
            views = {slot: whole[slot].narrow(0, start, length) for slot in self.spec.slots}
            counts = {key: x.clone() for key, x in self.inner.state[source.tensor].items() if key not in views}
            self.inner.state[segment] = {**views, **counts}
            if p in self._initial_state:
                self._initial_state[segment] = {
                    key: x.narrow(0, start, length) if isinstance(x, Tensor) and x.shape == p.shape else x
                    for key, x in self._initial_state[p].items()
                }
            if source.tensor in self._initialized:
                self._initialized.add(segment)
            segments.append(UpdatedSegment(start, name, segment))
        replaced = {id(one.tensor) for one in before}
        (entry, *_) = (entry for entry in self.inner.param_groups if id(entry["params"][0]) in replaced)
        others = [entry for entry in self.inner.param_groups if id(entry["params"][0]) not in replaced]
        self.inner.param_groups[:] = [*others, *({**entry, "params": [one.tensor]} for one in segments)]
        self._segments[p] = segments
        for one in before:
            one.tensor.grad = None
            if one.tensor is not p:
                self._forget(one.tensor)

    def _forget(self, x: Tensor) -> None:
        self.inner.state.pop(x)
        self._initial_state.pop(x, None)
        self._initialized.discard(x)

    def _add_skippable_placeholder(self, name: str) -> None:
        for p in self._placeholder:
            new = torch.zeros_like(p)
            self.inner.state[new] = {key: x.clone() for key, x in self.inner.state[p].items()}
            self._initial_state[new] = dict(self._initial_state[p])
            if p in self._initialized:
                self._initialized.add(new)
            (entry,) = (entry for entry in self.inner.param_groups if entry["params"][0] is p)
            self.inner.param_groups.append({**entry, "params": [new]})
            self._skippable_placeholders[name] = new

    def skip_state(self) -> dict[str, dict[str, Tensor]]:
        """Return, by parameter that updates skipped, their number ("") and its scalar state by name."""
        places = {name: self.inner.state[p] for name, p in self._skippable_placeholders.items()}
        return {
            name: {"": count, **{key: places[name][key] for key in self.spec.scalars}} for name, count in self._skips.items() if int(count)
        }

    def empty_skip_state(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return what `skip_state` may return for these parameters, to load a checkpoint into; without skips."""
        return {name: {"": torch.zeros((), dtype=torch.int64), **{key: torch.zeros(()) for key in self.spec.scalars}} for name in names}

    def set_skip_state(self, loaded: Mapping[str, Mapping[str, Tensor]], num_updates: int) -> None:
        """Give parameters that updates skipped their own counts and scalar state, after `set_steps(num_updates)`."""
        counts = {name: int(state[""]) for name, state in loaded.items() if int(state[""])}
        self.skip_parameters(frozenset(counts))
        self.skip_parameters(frozenset())
        for name, count in self._skips.items():
            count.fill_(counts.get(name, 0))
        segments = [(one.name, one.tensor) for parts in self._segments.values() for one in parts]
        for name, x in (*segments, *self._skippable_placeholders.items()):
            if name in counts:
                state = self.inner.state[x]
                if self.spec.is_standard and "step" in state:
                    state["step"].fill_(float(num_updates - counts[name]))
                for key in self.spec.scalars:
                    state[key].copy_(loaded[name][key])
                if counts[name] == num_updates:
                    self._initialized.discard(x)

    def _set_gradients(self) -> None:
        for pairs in () if self._inner_update.is_bound else self._updated:
            for p, g in pairs:
                if p not in self._segments:
                    p.grad = g
                for one in self._segments.get(p, ()):
                    one.tensor.grad = None if one.name in self._skipped else g.narrow(0, one.start, one.tensor.numel())

    def step(self, lr: float | None = None) -> Tensor | None:
        """Clip, update, and (ZeRO-1 and 2) all-gather the parameters. Returns the global gradient norm if clipping is on.

        The norm stays on its device: the host waits for the device only where it reads it. If the loss is scaled and any rank's gradients
        are not finite, the update is skipped, and there is no norm.
        """
        for group in self._groups:
            group.allocate()  # also before the first step
        if self.offload:
            for group, device_pairs, updated_pairs in zip(self._groups, self._on_device, self._updated, strict=True):
                for (weights, source), (copy, target) in zip(device_pairs, updated_pairs, strict=True):
                    target.copy_(source)
                    if group.members[0].is_written_by_model:
                        copy.copy_(weights)
        narrow = {number: self._updated[number] for number, is_narrow in enumerate(self._narrow_gradients) if is_narrow}
        for number, pairs in narrow.items():
            self._updated[number] = [(p, g.to(p.dtype)) for p, g in pairs]
        norm = self._clip() if self.spec.clip else None
        if self.scale is not None and self._overflowed(norm):
            return None
        for entry in self.inner.param_groups if lr is not None else ():
            entry["lr"] = lr
        self._set_gradients()
        self._update()
        for number, pairs in narrow.items():
            for x in (x for p, _ in pairs for x in (p, *(one.tensor for one in self._segments.get(p, ())))):
                x.grad = None
            self._updated[number] = pairs
            self._inner_update.unbind()  # from wide gradients, whose memory is free until the next update
        self._distribute_weights()
        return norm

    def _update(self) -> None:
        if not (self._initial_state or self._skips):
            return self._inner_update.run()
        for name, p in (*(("", p) for p in self._placeholder), *self._skippable_placeholders.items()):
            p.grad = None if name in self._skipped else torch.zeros_like(p)
        first = [p for p in self._initial_state if p.grad is not None and p not in self._initialized]
        allocated = {p: self.inner.state[p] for p in first}
        for p in first:
            self.inner.state[p] = {name: x.clone() if isinstance(x, Tensor) else x for name, x in self._initial_state[p].items()}
        self._inner_update.run()
        for p, state in allocated.items():
            for name, x in state.items():
                x.copy_(self.inner.state[p][name])
            self.inner.state[p] = state
        self._initialized.update(first)
        for count in (*self.update_counts, *(self._skips[name] for name in self._skipped)):
            count += 1

    def _distribute_weights(self) -> None:
        """Copy updated weights to the device (offload) and to fewer bits, and all-gather them over ranks (ZeRO-1 and 2).

        Gathers begin in the order in which a forward reads the weights, so that the next step's can overlap them.
        """
        for number, group in enumerate(self._groups):
            if self.offload or group.main is not None:
                for (target, _), (source, _) in zip(self._on_device[number], self._updated[number], strict=True):
                    target.copy_(source)
        works = []
        for number, k in self._gather_order:
            over, bucket = self._reduction_groups[number], self._groups[number].buckets[k]
            assert over is not None
            # Through `.data`: what autograd saves of other buckets has not changed when this one arrives.
            weights = self._groups[number].data.data[bucket.start : bucket.stop]
            work = over.all_gather_into(weights, self._on_device[number][k][0], wait=False)
            if not self.defer_gather((number, k), over, work):
                works.append(work)
        for work in works:
            work.wait()

    def _is_gathered_after_update(self, number: int) -> bool:
        return self.is_sharded[number] and not self._groups[number].is_gathered

    def unscale(self) -> None:
        """Divide reduced gradients by the loss scale."""
        if self.scale is not None:
            self.scale.unscale([g for pairs in self._on_device for _, g in pairs])

    def _overflowed(self, norm: Tensor | None) -> bool:
        """Return whether any rank has gradients that are not finite, by `norm` if there is one; also updates the loss scale."""
        assert self.scale is not None
        if norm is None:
            self._world.all_reduce(self.scale.overflowed, op="max")
        overflowed = bool(self.scale.overflowed) if norm is None else not isfinite(norm.item())
        self.scale.update(overflowed)
        return overflowed

    def norm(self) -> Tensor:
        """Return the global gradient norm of the whole model, each element counted once, on the device."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for number, group in enumerate(self._groups):
            # A shard is counted by its owner; a replicated gradient is counted by the first rank.
            if group.is_shard_counted if self._has_whole_replica or self.is_sharded[number] else group.is_counted:
                for _, g in self._updated[number]:
                    total += (torch.linalg.vector_norm(g).double() ** 2).to(total.device)
        self._world.all_reduce(total)
        return total.sqrt()

    def _clip(self) -> Tensor:
        norm = self.norm()
        ratio = (self.spec.clip / (norm + 1e-6)).clamp(max=1.0)  # NaN stays NaN, and makes all gradients NaN, as torch's clipping does
        scale = ratio if self.clips_on_device else ratio.item()
        if self.clips_on_device or not scale >= 1.0:
            for pairs in self._updated:
                for _, g in pairs:
                    g.mul_(scale)
        return norm
