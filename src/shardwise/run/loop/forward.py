"""The forward of a sharded module, computed by captured graphs: one for each combination of module modes and input structure.

It returns the module's output for this rank's samples, in full tensors. A plain loop reduces a parameter's gradient over the same ranks
whichever capture computed it (`run/loop/shard_module`), so partial gradients over any other axis are reduced where the parameter enters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.capture.attribute_reads import AttributeRead
from shardwise.capture.modes import Modes
from shardwise.capture.nesting import BatchLeaves, BatchSignature, batch_size_of, named_leaves, replace_leaves, tensors_of
from shardwise.errors import Infeasible, ModelError
from shardwise.lower.direct_calls import call_operators_directly
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.redistribute import redistribute, scale_gradient
from shardwise.plan.ir.axis import DATA, sample_axes
from shardwise.plan.ir.placement import D, R, even_shard_range, is_halo, is_shard, shard
from shardwise.plan.plan import Plan
from shardwise.run.checkpoint import StateShard
from shardwise.run.gradients.loop_reducer import LoopGradientReducer
from shardwise.run.gradients.outside_parameters import ModuleCall
from shardwise.run.gradients.replica_watch import INTERVAL
from shardwise.run.loop.attribute_watch import AttributeChanges, AttributeWatch
from shardwise.run.loop.batch_agreement import BatchMode, CallSamples, agree_on_batch
from shardwise.run.loop.bucket_gathers import ZeroShard
from shardwise.run.loop.cumulative_statistics import average_cumulatively, cumulative_norms
from shardwise.run.loop.full_weights import FullWeightCache
from shardwise.run.loop.hooks import HookedModules, call_hooks, record_hooked_calls
from shardwise.run.loop.model_outputs import find_summed_outputs, returnable_output, start_sum
from shardwise.run.loop.mutation_guard import MutationGuard
from shardwise.run.loop.optimizer_steps import OptimizerSteps
from shardwise.run.loop.original_module import OriginalModule
from shardwise.run.loop.zero_gather import GatheredWeightSaver, insert_weight_reads
from shardwise.run.parts.lru_cache import MAX_CAPTURES, MAX_MICROBATCH_SIZES, LRUCache
from shardwise.run.parts.rank_model import RankModel, with_tensors
from shardwise.run.parts.rows import CallConvention
from shardwise.run.rank_model.build import BuildRequest, build_rank_model
from shardwise.run.rank_model.model_source import CachedModelSource, ModelSource
from shardwise.run.sharded_state import full_state, narrow_to, weight_shards
from shardwise.run.state.precision import autocast_dtype_of
from shardwise.world import private
from shardwise.world.world import CollectiveWork, Group, World

_NO_CASTS = _NO_GATHERS = nullcontext()


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
        values = list(map(parts.variables.get, self._variables))
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
        autocast = autocast_dtype_of(self.plan.layout.precision) or user_dtype
        saved, module, summed = self._prepared_module
        while self.sums:
            self.sums.pop().wait()
        casts = _NO_CASTS if autocast is None else torch.autocast(kind, dtype=autocast)
        with private.as_base_tensor(), casts, saved.run(values) if saved.buckets else _NO_GATHERS:
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
        """What runs the module, and the saver of its gathered weights, with the groups of outputs, by position, that are summed behind it:
        scalars over ranks with different samples, where each counts alike."""
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


# The model's modes, the form of its inputs, which samples these are, the hooks on its submodules, and its changed attributes.
CallKey = tuple[Modes, Hashable, BatchMode, HookedModules, AttributeChanges]


@dataclass(frozen=True)
class ModuleCaptures:
    """The captures of one model, by its modes and input structure: `net(x)` is another graph than `net(x, targets)`.

    Copies of the model share them. `rank_model`: the training capture, made in `modes` on `batch_mode`; `variants`: captures made since.
    """

    rank_model: RankModel
    plan: Plan
    source: ModelSource
    batch: Any
    world: World
    original: OriginalModule
    signature: inspect.Signature
    modes: Modes
    variants: LRUCache[RankModel] = field(default_factory=lambda: LRUCache(MAX_CAPTURES))
    attribute_reads: set[AttributeRead] = field(default_factory=set)
    bindings: LRUCache[dict[str, Any] | tuple[Any, ...]] = field(default_factory=lambda: LRUCache(MAX_MICROBATCH_SIZES))

    @cached_property
    def batch_form(self) -> BatchSignature:
        """The form of the batch that it was captured with."""
        return BatchSignature.of(self.batch)

    def rank_model_for(self, call: CallKey, inputs: Any, num_samples: int) -> RankModel:
        """Return the rank model for such a call of so many samples; it is captured at the first call."""
        is_training_call = call == (self.modes, self.batch_form.key, BatchMode.LOCAL_SHARD, (), ())
        if is_training_call and num_samples == self.plan.batch_size:
            return self.rank_model
        base = (
            self.rank_model
            if is_training_call
            else self.variants.get_or_build(call, lambda: self._build_capture(call, inputs, num_samples))
        )
        try:
            with self.original.restored(), record_hooked_calls(self.source.model, call[3]):
                variant = base.microbatch_variant(num_samples, num_samples)
        except Infeasible:  # with that many samples it computes another graph
            return self._build_capture(call, inputs, num_samples)
        variables = {**base.variables, **{v: x for v, x in variant.constants.items() if v in base.variables}}
        return replace(base, graph=variant.loss_graph.graph, sharding=variant.sharding, lowered=dict(variant.lowered), variables=variables)

    def _build_capture(self, call: CallKey, inputs: Any, num_samples: int) -> RankModel:
        # A source caches captures of one input form.
        is_usual = call[1] == self.batch_form.key and not call[3] and not call[4]
        batch, source = (self.batch, self.source) if is_usual else (inputs, CachedModelSource(self.source.model, self.source.deferred))
        try:
            with self.original.restored(), record_hooked_calls(self.source.model, call[3]):
                request = BuildRequest(
                    self.plan,
                    source,
                    batch,
                    None,
                    self.world,
                    modes=call[0],
                    runs_backward=False,
                    returns_outputs=True,
                    microbatch_size=num_samples,
                    is_replicated=call[2] is BatchMode.REPLICATED,
                    gathers_outputs=call[2] is BatchMode.GLOBAL_BATCH,
                )
                rank_model = build_rank_model(request, self.rank_model)
        except ModelError as error:
            mode = "trains" if call[0][0] else "evaluates"
            names = ", ".join(sorted(tensors_of(inputs)))
            raise ModelError(f"the model as it {mode} now, called with {names}, cannot be divided: {error}") from error
        self.attribute_reads.update(source.attribute_reads)
        return rank_model

    def nest_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a call's arguments nested like the captured batch: by keyword or in order. Calls of one form are bound once."""
        places = self.bindings.get_or_build(
            (len(args), *kwargs), lambda: self._bind_arguments(tuple(range(len(args))), {name: name for name in kwargs})
        )
        if isinstance(places, dict):
            return {name: kwargs[place] if isinstance(place, str) else args[place] for name, place in places.items()}
        return tuple([kwargs[place] if isinstance(place, str) else args[place] for place in places])

    def _bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | tuple[Any, ...]:
        bound = self.signature.bind(*args, **kwargs)
        if not isinstance(self.batch, Mapping):
            if bound.kwargs:
                raise Infeasible(
                    f"the model was captured with arguments in order, and is called with {', '.join(bound.kwargs)} by keyword alone"
                )
            return bound.args
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise Infeasible(f"the model was captured with arguments by keyword, and is called with {len(value)} more in order")
            arguments.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return arguments


@dataclass(frozen=True)
class GraphReplica:
    """The replica of a captured module (`run/loop/module`). `rank_model`: its training capture over this module's own tensors.
    `gradient_reducer`: None for a copy, which does not train."""

    model: nn.Module
    rank_model: RankModel
    captures: ModuleCaptures
    mutation_guard: MutationGuard
    attributes: AttributeWatch
    gradient_reducer: LoopGradientReducer | None = None
    optimizer_steps: OptimizerSteps | None = None
    call_convention: CallConvention = field(default_factory=CallConvention)
    agreed_forms: set[tuple[int, int]] = field(default_factory=set)  # form and samples of batches that ranks have compared
    forms: LRUCache[BatchSignature] = field(default_factory=lambda: LRUCache(MAX_MICROBATCH_SIZES))
    forwards: LRUCache[CapturedForward] = field(default_factory=lambda: LRUCache(1 + MAX_CAPTURES))

    @property
    def draw(self) -> DrawState:
        """State of its random draws, shared with its copies."""
        return self.rank_model.draw

    def check(self) -> None:
        """Raise UsageError if the module was changed in a way that its graphs do not see, or an update of it was interrupted."""
        self.mutation_guard.check()
        if self.optimizer_steps is not None:
            self.optimizer_steps.check()

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output for this rank's samples. Generation (new objects in the inputs, no gradients) runs the model's own code."""
        if self.batch_norms and (names := cumulative_norms(self.batch_norms)):
            with average_cumulatively(self.model, self.captures.source.model, names):
                return self._compute(args, kwargs, names)
        return self._compute(args, kwargs, ())

    @cached_property
    def batch_norms(self) -> list[tuple[str, nn.Module]]:
        """The batch norms of the model, by name."""
        return [(name, m) for name, m in self.model.named_modules() if isinstance(m, private.BatchNorm)]

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], cumulative: tuple[str, ...]) -> Any:
        leaves = BatchLeaves(called := self.captures.nest_arguments(args, kwargs))
        form = self._form_of(leaves)
        if torch.is_grad_enabled():
            self.captures.batch_form.check_objects(form)
            self.gathered_weights.clear()
            if self.gradient_reducer is not None:
                self.gradient_reducer.forget_interrupted_backward()
        elif self.captures.batch_form.differing_objects(form):
            with self.gathered_weights.full_weights_in(self.model, self.rank_model, self.captures.plan.layout.mesh):
                return type(self.model).forward(self.model, *args, **kwargs)
        hooked = self.mutation_guard.hooked_modules()
        key = (form.key, cumulative) if cumulative else form.key
        modes = tuple([module.training for module in self._modules])
        call = (modes, key, BatchMode.LOCAL_SHARD, hooked, self.attributes.changes())
        samples, batch = self._resolve_samples(call, called, leaves, form)
        forward = self._forward_for((*call[:2], batch, *call[3:]), samples, called)
        forward.rank_model.draw.step += 1
        output = forward(leaves.tensors)
        if hooked:
            output, calls = output
            call_hooks(self.model, hooked, calls)
        has_own_samples = batch is BatchMode.LOCAL_SHARD and max(self._sample_shards) > 0
        num_local = leaves.num_rows if has_own_samples else 0
        if self.captures.world.num_ranks > 1:
            ModuleCall(self.captures.world, self._parameter_ids, num_local, forward.relative_share).record(called, output)
        return output

    @cached_property
    def _modules(self) -> tuple[nn.Module, ...]:
        """The module and its submodules; `check` refuses others."""
        return tuple(self.model.modules())

    @cached_property
    def _parameter_ids(self) -> frozenset[int]:
        return frozenset(map(id, self.rank_model.parameters.values()))

    @cached_property
    def gathered_weights(self) -> FullWeightCache:
        """Full weights, for calls that run the model's own code."""
        return FullWeightCache(self.captures.world)

    def _form_of(self, leaves: BatchLeaves) -> BatchSignature:
        """Return the signature of a call's arguments; kept for shapes that come again."""
        if (key := leaves.key) is None:
            return BatchSignature.of_leaves(leaves)
        return self.forms.get_or_build(key, lambda: BatchSignature.of_leaves(leaves))

    def _resolve_samples(self, call: CallKey, inputs: Any, leaves: BatchLeaves, form: BatchSignature) -> tuple[int, BatchMode]:
        """Return the global number of samples, and the mode in which ranks are called with them.

        Raises:
            Infeasible: on all ranks, if they are called with other shards than `shardwise.shard` gives, or with different forms.
        """
        num_local = leaves.num_rows
        if self.captures.world.num_ranks == 1:
            return num_local, BatchMode.LOCAL_SHARD
        samples, places, layout = leaves.num_samples, self._sample_shards, self.captures.plan.layout
        n, batch = max(places) + 1, BatchMode.LOCAL_SHARD
        if n == 1 and torch.is_grad_enabled():  # all ranks have all samples
            known, world = (form.checksum, num_local), self.captures.world
            on_host = world.device.type == "cpu"  # reading a GPU's inputs would wait for it
            is_due = (on_host and not samples) or self.draw.step % INTERVAL == 0
            if is_due or known not in self.agreed_forms:
                self._agree_on_batch(inputs, num_local, form)
                self.agreed_forms.add(known)
            return num_local, batch
        if not samples:
            # Without gradients and communication, a rank may call the model alone.
            alone = (
                not (torch.is_grad_enabled() or self.call_convention.is_global_batch)
                and not self._forward_for(call, num_local * n, inputs).communicates
            )
            samples, batch = (num_local, batch) if alone else self._agree_on_batch(inputs, num_local, form)  # alone: on its own samples
        elif torch.is_grad_enabled() and self.captures.world.num_ranks > n and self.draw.step % INTERVAL == 0:
            self._agree_on_batch(inputs, num_local, form)  # ranks with the same samples have the same tensors
        if n == 1:
            return num_local, BatchMode.LOCAL_SHARD
        if samples == num_local and layout.expert == 1 and (batch is BatchMode.LOCAL_SHARD or num_local < n):
            return num_local, BatchMode.REPLICATED
        if batch is BatchMode.LOCAL_SHARD and num_local != even_shard_range(samples, n, places[self.captures.world.rank])[1]:
            raise Infeasible(
                f"the model was called with {num_local} of {samples} samples, which {layout} divides otherwise; draw batches through "
                "shardwise.shard(loader)"
            )
        return samples, batch

    @cached_property
    def _sample_shards(self) -> list[int]:
        """Index of the shard of samples that each rank has."""
        mesh = self.captures.plan.layout.mesh
        axes = sample_axes(mesh.stage_axes)
        return [mesh.group(rank, *axes).index(rank) for rank in range(self.captures.world.num_ranks)]

    def _agree_on_batch(self, inputs: Any, num_local: int, form: BatchSignature) -> tuple[int, BatchMode]:
        captures, is_global = self.captures, self.call_convention.is_global_batch
        samples = CallSamples(inputs, num_local, form.checksum)
        return agree_on_batch(captures.world, captures.plan.layout, self._sample_shards, samples, is_global)

    def _forward_for(self, call: CallKey, num_samples: int, inputs: Any) -> CapturedForward:
        def build() -> CapturedForward:
            captures, n = self.captures, max(self._sample_shards) + 1
            parts = with_tensors(captures.rank_model_for(call, inputs, num_samples), self.rank_model.parameters, self.rank_model.buffers)
            reduced_axes = {name: spec.reduction_axes for name, spec in parts.local_parameters.items()}
            relative_share = batch_size_of(inputs) * n / num_samples if call[2] is BatchMode.LOCAL_SHARD else 1.0
            return CapturedForward(parts, captures.plan, captures.world, reduced_axes, call[2], relative_share)

        return self.forwards.get_or_build((call, num_samples), build)

    def for_copy(self, copied: nn.Module, memo: Mapping[int, Any]) -> GraphReplica:
        """Return a replica with the same captures over the copy's tensors."""
        tensor_tables = self.rank_model.parameters, self.rank_model.buffers
        parameters, buffers = ({name: memo.get(id(x), x) for name, x in tensors.items()} for tensors in tensor_tables)
        rank_model, attributes = with_tensors(self.rank_model, parameters, buffers), self.attributes.copied_to(copied)
        return GraphReplica(copied, rank_model, self.captures, MutationGuard(copied), attributes)

    def state_shards(self) -> list[StateShard]:
        """Return this rank's shards of the state dict, for a checkpoint."""
        variables = {v.name: v for v in self.rank_model.graph.buffers}
        saved = {name for name, v in variables.items() if not self.rank_model.state_dict_names.isdisjoint((name, *v.aliases))}
        return [piece for piece in self._weight_shards() if piece.kind == "parameter" or piece.name in saved]

    def full_state(self) -> dict[str, Tensor] | None:
        """Return the full state dict on rank 0, None elsewhere. Every rank calls it."""
        with private.as_base_tensor():
            return full_state(self.rank_model, self._weight_shards(), self.captures.world.world_group)

    def _weight_shards(self) -> list[StateShard]:
        return weight_shards(self.rank_model, self.captures.plan.layout.mesh.coordinates(self.captures.world.rank))
