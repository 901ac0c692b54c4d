"""The forward of a sharded module, computed by captured graphs: one for each combination of module modes and input structure.

It returns the module's output for this rank's samples, in full tensors (`run/loop/captured_forward`). What a call asks for is compared with
the last call's first: a loop calls its model in one way, over and over.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.attribute_reads import AttributeRead
from shardwise.capture.modes import Modes
from shardwise.capture.nesting import BatchLeaves, BatchSignature, batch_size_of, tensors_of
from shardwise.errors import Infeasible, ModelError
from shardwise.lower.kernels.randomness import DrawState
from shardwise.plan.ir.axis import sample_axes
from shardwise.plan.ir.placement import even_shard_range
from shardwise.plan.plan import Plan
from shardwise.run.checkpoint import StateShard
from shardwise.run.gradients.loop_reducer import LoopGradientReducer
from shardwise.run.gradients.outside_parameters import ModuleCall
from shardwise.run.gradients.replica_watch import INTERVAL
from shardwise.run.loop.attribute_watch import AttributeChanges, AttributeWatch
from shardwise.run.loop.batch_agreement import BatchMode, CallSamples, agree_on_batch
from shardwise.run.loop.captured_forward import CapturedForward
from shardwise.run.loop.cumulative_statistics import average_cumulatively, cumulative_norms
from shardwise.run.loop.full_weights import FullWeightCache
from shardwise.run.loop.hooks import HookedModules, call_hooks, record_hooked_calls
from shardwise.run.loop.mutation_guard import MutationGuard
from shardwise.run.loop.optimizer_steps import OptimizerSteps
from shardwise.run.loop.original_module import OriginalModule
from shardwise.run.parts.lru_cache import MAX_CAPTURES, MAX_MICROBATCH_SIZES, LRUCache
from shardwise.run.parts.rank_model import RankModel, with_tensors
from shardwise.run.parts.rows import CallConvention
from shardwise.run.rank_model.build import BuildRequest, build_rank_model
from shardwise.run.rank_model.model_source import CachedModelSource, ModelSource
from shardwise.run.sharded_state import full_state, weight_shards
from shardwise.world import private
from shardwise.world.world import World

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
    bindings: LRUCache[dict[str, Any] | tuple[Any, ...] | None] = field(default_factory=lambda: LRUCache(MAX_MICROBATCH_SIZES))

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
        if places is None:
            return kwargs
        if isinstance(places, dict):
            return {name: kwargs[place] if isinstance(place, str) else args[place] for name, place in places.items()}
        return tuple([kwargs[place] if isinstance(place, str) else args[place] for place in places])

    def _bind_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | tuple[Any, ...] | None:
        """Return the place of every argument; None where they are nested as the call has them, by keyword and in order."""
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
        return None if list(arguments.items()) == [(name, name) for name in kwargs] else arguments


@dataclass
class KeptCall:
    """The last call of a module. `asked`: all that its graph depends on but the batch's samples; None: it has objects that may change."""

    asked: tuple[Any, ...] | None = None
    form: BatchSignature | None = None
    forward: tuple[CallKey, int, CapturedForward] | None = None


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
    kept: KeptCall = field(default_factory=KeptCall)

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
        trains, kept = torch.is_grad_enabled(), self.kept
        if trains:
            self.gathered_weights.clear()
            if self.gradient_reducer is not None:
                self.gradient_reducer.forget_interrupted_backward()
        modes, hooked = tuple([module.training for module in self._modules]), self.mutation_guard.hooked_modules()
        asked = (leaves.key, trains, modes, hooked, self.attributes.changes(), cumulative)
        is_kept = asked[0] is not None and asked == kept.asked
        form = kept.form if is_kept and kept.form is not None else self._form_of(leaves)
        if not is_kept and trains:
            self.captures.batch_form.check_objects(form)
        elif not is_kept and self.captures.batch_form.differing_objects(form):
            with self.gathered_weights.full_weights_in(self.model, self.rank_model, self.captures.plan.layout.mesh):
                return type(self.model).forward(self.model, *args, **kwargs)
        key = (form.key, cumulative) if cumulative else form.key
        call: CallKey = (modes, key, BatchMode.LOCAL_SHARD, hooked, asked[4])
        samples, batch = self._resolve_samples(call, called, leaves, form)
        if is_kept and kept.forward is not None and kept.forward[0][2] is batch and kept.forward[1] == samples:
            forward = kept.forward[2]
        else:
            forward = self._keep_call(asked, form, (modes, key, batch, hooked, asked[4]), samples, called)
        forward.rank_model.draw.step += 1
        output = forward(leaves.tensors)
        if hooked:
            output, calls = output
            call_hooks(self.model, hooked, calls)
        if self.captures.world.num_ranks > 1:
            num_local = leaves.num_rows if batch is BatchMode.LOCAL_SHARD and max(self._sample_shards) > 0 else 0
            ModuleCall(self.captures.world, self._parameter_ids, num_local, forward.relative_share).record(called, output)
        return output

    def _keep_call(self, asked: tuple[Any, ...], form: BatchSignature, call: CallKey, samples: int, inputs: Any) -> CapturedForward:
        """Return what runs a call, and keep it for the next one."""
        kept = self.kept
        if kept.forward is not None:
            self.forwards.find(kept.forward[:2])  # used until now
        forward = self._forward_for(call, samples, inputs)
        kept.asked, kept.form, kept.forward = asked, form, (call, samples, forward)
        return forward

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
