"""Run one captured graph of a sharded module on a call's tensors: this rank's part of the inputs in, its samples' outputs in full tensors.

A plain loop reduces a parameter's gradient over the same ranks whichever capture computed it (`run/loop/shard_module`), so partial
gradients over any other axis are reduced where the parameter enters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.capture.nesting import named_leaves, replace_leaves
from shardwise.lower.direct_calls import call_operators_directly
from shardwise.lower.redistribute import redistribute, scale_gradient
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.placement import D, R, is_halo, is_shard, shard
from shardwise.plan.plan import Plan
from shardwise.run.loop.batch_agreement import BatchMode
from shardwise.run.loop.bucket_gathers import ZeroShard
from shardwise.run.loop.model_outputs import find_summed_outputs, returnable_output, start_sum
from shardwise.run.loop.zero_gather import GatheredWeightSaver, insert_weight_reads
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.sharded_state import narrow_to
from shardwise.run.state.precision import autocast_dtype_of
from shardwise.world import private
from shardwise.world.world import CollectiveWork, Group, World


@dataclass(frozen=True)
class CapturedForward:
    """The forward of one capture. `reduced_axes`: axes over which the loop reduces each parameter's gradient, by name. `relative_share`:
    number of this replica's samples over that of an equal share."""

    rank_model: RankModel
    plan: Plan
    world: World
    reduced_axes: Mapping[str, tuple[str, ...]]
    batch_mode: BatchMode = BatchMode.LOCAL_SHARD
    relative_share: float = 1.0
    sums: list[CollectiveWork] = field(default_factory=list)  # started sums of outputs, which may be unread
    ranges: dict[tuple[str, torch.Size], list[tuple[int, int, int]]] = field(default_factory=dict)  # of this rank's part of an input

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """Return the output. `inputs`: the tensors of the call by path."""
        parts, device = self.rank_model, self.world.device
        values: list[Any] = list(map(parts.variables.get, self._variables))
        for value, name, positions in self._input_places:
            x = inputs[name]
            x = x if x.device == device else x.to(device)
            if x.requires_grad and torch.is_grad_enabled():  # the loop differentiates by it, or layers before the module train
                x = self._enter_differentiable_input(value, x)
            elif ranges := self._local_ranges(value, x.shape):
                x = narrow_to(x, ranges)
            for position in positions:
                values[position] = x
        for position, group in self._extra_gradient_reductions:
            values[position] = redistribute(values[position], R, D, group)
        for position, share in self._gradient_scales:
            values[position] = scale_gradient(values[position], share)
        kind = device.type
        user_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None  # the user's own autocast around the call
        autocast = self._own_dtype or user_dtype
        saved, module, summed = self._prepared_module
        while self.sums:
            self.sums.pop().wait()
        if autocast is None and not saved.buckets:
            with private.as_base_tensor():
                results = module(*values)
        else:
            casts = nullcontext() if autocast is None else torch.autocast(kind, dtype=autocast)
            with private.as_base_tensor(), casts, saved.run(values) if saved.buckets else nullcontext():
                results = module(*values)
        outputs = []
        for i, (groups, x) in enumerate(zip(self._equal_output_groups, results, strict=True)):
            for group in groups if x.is_floating_point() else ():
                x = x if group is summed.get(i) else redistribute(x, R, D, group)
            if i in summed:
                outputs.append(start_sum(x, summed[i], self.sums))
                continue
            # The loop averages over this rank's samples; its gradient is weighted by their number.
            x = x if self.relative_share == 1.0 else scale_gradient(x, self.relative_share)
            outputs.append(private.as_writable(x))  # a loop may change an output in place: a loss, an image that it scales
        if isinstance(parts.structure, Tensor):
            return outputs[0]
        paths, constants = self._outputs
        return replace_leaves(parts.structure, constants | dict(zip(paths, outputs, strict=True)))

    def _local_ranges(self, value: str, shape: torch.Size) -> list[tuple[int, int, int]]:
        """Return the ranges of this rank's part of an input of this shape."""
        found = self.ranges.get((value, shape))
        if found is None:
            sharding, at = self.rank_model.sharding, self.plan.layout.mesh.coordinates(self.world.rank)
            excluded = () if self.batch_mode is BatchMode.GLOBAL_BATCH else sharding.sample_axes
            found = self.ranges[value, shape] = sharding.stored(value, shape, at, excluded_axes=excluded)
        return found

    @cached_property
    def _own_dtype(self) -> torch.dtype | None:
        """The dtype of the layout's autocast, if any."""
        return autocast_dtype_of(self.plan.layout.precision)

    @cached_property
    def _variables(self) -> tuple[str, ...]:
        """The graph's parameters, buffers and inputs, in its order."""
        return tuple(self.rank_model.single_stage.variables)

    @cached_property
    def _input_places(self) -> list[tuple[str, str, list[int]]]:
        """Graph value, path in the call and positions among `_variables` of every input."""
        graph, own = self.rank_model.graph, self.rank_model.variables
        return [(v.value, v.name, [i for i, x in enumerate(self._variables) if x == v.value and x not in own]) for v in graph.inputs]

    @cached_property
    def communicates(self) -> bool:
        """Return whether the graph communicates, so that all ranks must call it, with tensors of the same shapes."""
        groups: list[Group] = []
        for node in getattr(self.rank_model.single_stage.module, "graph", fx.Graph()).nodes:
            fx.node.map_aggregate((node.args, node.kwargs), lambda x: groups.append(x) if isinstance(x, Group) and x.size > 1 else None)
        return bool(groups or self.rank_model.zero_shards)

    @cached_property
    def _outputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's output by path: tensors, and all other leaves as they will be returned."""
        returned = list(named_leaves(self.rank_model.structure))
        tensors = {path: leaf for path, leaf in returned if isinstance(leaf, Tensor)}
        return tensors, {path: returnable_output(path, leaf) for path, leaf in returned if path not in tensors}

    @cached_property
    def _gradient_axes(self) -> dict[str, tuple[set[str], set[str]]]:
        """Trained parameters by graph value: axes over which this capture leaves partial gradients, and axes that the loop reduces."""
        names = {member.name for group in self.rank_model.groups for member in group.members}
        gradients, pieces = self.rank_model.sharding.gradient_axes, self.rank_model.zero_shards
        return {  # the all-gather of ZeRO shards reduces over data in its backward
            v.value: (set(gradients.get(v.value, ())) - ({DATA} if v.name in pieces else set()), set(self.reduced_axes[v.name]))
            for v in self.rank_model.graph.parameters
            if v.name in names
        }

    @cached_property
    def _module_with_gathers(self) -> tuple[GatheredWeightSaver, nn.Module]:
        """The module to run, with all-gathers of ZeRO shards and casts of weights inserted, and the saver of its gathered weights."""
        parts, saved, module = self.rank_model, GatheredWeightSaver(self.plan.layout.zero == 3), self.rank_model.single_stage.module
        names = {v.value: v.name for v in parts.graph.parameters if v.name in parts.zero_shards}
        held = {} if parts.lowering is None else parts.lowering.held_dtypes
        if not (names or held):
            return saved, module
        assert isinstance(module, fx.GraphModule)
        read = R if self.batch_mode is BatchMode.REPLICATED else D  # where every rank computes all samples, its gradient is complete
        over, dtypes = self._group(DATA), {name: p.dtype for name, p in parts.parameters.items()}
        shards = {v: ZeroShard(name, parts.zero_shards[name], read, over, dtypes[name], held.get(v)) for v, name in names.items()}
        return saved, insert_weight_reads(module, [(shards.get(v), held.get(v)) for v in parts.single_stage.variables], saved)

    @cached_property
    def _equal_output_groups(self) -> list[tuple[Group, ...]]:
        """Return, by output, the groups of ranks with different samples on which it is equal. Each rank may use it differently (to scale
        its own samples' scores), so its gradients are reduced."""
        stage, axes = self.rank_model.single_stage, self.rank_model.sharding.sample_axes
        return [tuple(self._group(axis) for axis in axes if not is_shard(stage.placements[name].get(axis, R))) for name in stage.results]

    @cached_property
    def _prepared_module(self) -> tuple[GatheredWeightSaver, Callable[..., Any], dict[int, Group]]:
        """The saver of the module's gathered weights, the function that runs it, and the groups of outputs, by position, that are summed
        behind it: scalars over ranks with different samples, where each counts alike."""
        saved, module = self._module_with_gathers
        if not isinstance(module, fx.GraphModule):
            return saved, module, {}
        if self.relative_share != 1.0:
            return saved, call_operators_directly(module), {}
        tensors, stage = self.rank_model.graph.tensors, self.rank_model.single_stage
        scalars = {i for i, name in enumerate(stage.results) if not tensors[name].shape and tensors[name].dtype.startswith("float")}
        groups = {self._group(axis) for axis in self.rank_model.sharding.sample_axes}
        module, summed = find_summed_outputs(module, scalars, groups)
        return saved, call_operators_directly(module), summed

    @cached_property
    def _extra_gradient_reductions(self) -> list[tuple[int, Group]]:
        """Positions of parameters with partial gradients that the loop does not reduce, with the groups to reduce over."""
        sums = []
        for i, value in enumerate(self.rank_model.single_stage.variables):
            partial, exchanged = self._gradient_axes.get(value, (set[str](), set[str]()))
            sums += [(i, self._group(axis)) for axis in self.rank_model.sharding.sizes if axis in partial - exchanged]
        return sums

    @cached_property
    def _gradient_scales(self) -> list[tuple[int, float]]:
        """Positions of parameters whose number of partial gradients is not that of the data ranks, with the ratio of the two.

        The reducer takes a mean (see `run/loop/shard_module`), which this ratio corrects.
        """
        data, sizes = 1 if self.batch_mode is BatchMode.REPLICATED else self.plan.layout.data, self.rank_model.sharding.sizes
        shares = {
            value: prod(sizes[axis] for axis in partial & exchanged) / data for value, (partial, exchanged) in self._gradient_axes.items()
        }
        return [(i, shares[v]) for i, v in enumerate(self.rank_model.single_stage.variables) if shares.get(v, 1.0) != 1.0]

    def _enter_differentiable_input(self, value: str, x: Tensor) -> Tensor:
        """Return this rank's shard of an input, whose gradient is that of the input as the loop holds it.

        Of a global batch, every rank gets the gradient by all of it, as it got all outputs; of a shard of the samples, a rank gets the
        gradient by its samples. Within the module gradients are `num_sample_shards` times the loop's (see `run/loop/shard_module`).
        """
        sharding, partial = self.rank_model.sharding, self.rank_model.sharding.gradient_axes.get(value, ())
        share, sample_axes_ = 1.0, sharding.sample_axes
        has_own_samples = False
        for axis, form in sharding.placements[value].items():
            is_sample_axis = axis in sample_axes_
            if is_sample_axis and self.batch_mode is BatchMode.GLOBAL_BATCH:
                share /= sharding.sizes[axis]
            if is_sample_axis and self.batch_mode is not BatchMode.GLOBAL_BATCH:
                has_own_samples |= is_shard(form)
                share /= 1 if is_shard(form) or axis in partial else sharding.sizes[axis]
            elif is_shard(form) and not (form.lengths or form.runs):
                x = redistribute(x, R, shard(form.dim, x.shape[form.dim], sharding.sizes[axis]), self._group(axis))
            elif is_shard(form) or is_halo(form):
                x = redistribute(x, R, form, self._group(axis))
            elif axis in partial:
                x = redistribute(x, R, D, self._group(axis))
        return scale_gradient(x, share / self.relative_share if has_own_samples else share)

    def _group(self, axis: str) -> Group:
        return self.world.group(self.plan.layout.mesh.group(self.world.rank, axis))
