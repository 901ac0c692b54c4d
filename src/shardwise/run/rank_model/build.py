"""Build one rank's model from a plan: capture the graph, shard it, cut it into stages, lower this rank's, initialise its parameters.

In: a plan, a model (deferred, real, or a factory), the batch and the loss. Out: the `RankModel` that the engine runs. Every rank does
this by itself from the same inputs (SPMD), so that only gradients and activations are ever sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardwise.capture.cache import cached_capture
from shardwise.capture.capture import CapturedGraph, Loss, capture
from shardwise.capture.fakes import fake_copy, fake_mode
from shardwise.capture.initialization import DeferredInit, loss_of, materialize_loss, materialize_shards, take_real_shards
from shardwise.capture.modes import Modes, in_modes, training_modes
from shardwise.capture.unsupported_models import refuse_hooks, refuse_scripts
from shardwise.errors import Infeasible, LayoutError, ModelError
from shardwise.lower.groups import groups_of
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import Lowering, layer_of, lower
from shardwise.lower.pending_constants import PendingConstants
from shardwise.model.batch.random_draws import SampleFold, find_sample_folds
from shardwise.model.batch.samples import check_samples
from shardwise.model.batch.summable_loss import SummableLossGraph
from shardwise.model.gc_pause import gc_paused
from shardwise.model.gradients import parameters_with_gradient
from shardwise.model.graph import Graph
from shardwise.model.sharding.propagate import propagate
from shardwise.model.sharding.sample_shards import resize_sample_shards
from shardwise.model.sharding.sharding import Prices, Sharding, priced_num_samples
from shardwise.plan.ir.axis import axis_of, sample_axes
from shardwise.plan.ir.grid import GRID_AXES, TENSOR
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.patterns import expand_shards
from shardwise.plan.ir.placement import is_shard
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.gradients.choose_all_reduce import choose_all_reduce
from shardwise.run.parts.local_blocks import InitialValues, LocalBlocks, shard_stored_parameters, zero_shards
from shardwise.run.parts.lru_cache import MAX_MICROBATCH_SIZES
from shardwise.run.parts.microbatch import CapturedMicrobatch, depends_on_sizes_only, normalise_microbatch
from shardwise.run.parts.microbatch_variants import MicrobatchVariant, constants_on_device, lower_variant, sample_shares
from shardwise.run.parts.rank_model import RankModel, program_of
from shardwise.run.parts.stage_meshes import (
    always_summed_adjustments,
    always_summed_axes,
    gradient_shares,
    received_across_meshes,
    stage_shardings,
    variables_across_meshes,
)
from shardwise.run.residency.layer_modules import layers_reading
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.state.parameters import build_groups
from shardwise.run.state.precision import DTYPES
from shardwise.world.world import World


@dataclass(frozen=True)
class ModelSource:
    """A model under deferred initialisation (`deferred`), which has no memory yet, or a real one (`deferred` is None).

    `prices`: cost model that chooses the sharding of what the plan leaves open; None: the default prices; `FREE_LINKS` shards wherever the
    rules allow. Without `has_values` parameters and buffers are allocated but not initialised; the caller fills them.
    """

    model: nn.Module
    deferred: DeferredInit | None
    prices: Prices | None = None
    has_values: bool = True

    @classmethod
    def from_model(cls, model: nn.Module | Callable[[], nn.Module]) -> Self:
        """Wrap a module as it is, or call a factory under deferred initialisation."""
        if isinstance(model, nn.Module):
            refuse_scripts(model)
            return cls(model, None)
        with gc_paused(), DeferredInit() as deferred:
            built = model()
        refuse_scripts(built)
        return cls(built, deferred)

    def loss_of(self, loss: Loss | None) -> Loss | None:
        """Return the loss that belongs to this model, materialised if it was built under deferred initialisation too."""
        criterion = loss_of(loss, self.model)
        return criterion if criterion is None or self.deferred is None else materialize_loss(self.deferred, criterion, self.model)

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> CapturedGraph:
        """Capture the model on a batch of `batch_size` samples, in training mode or in other `modes`.

        Raises:
            ModelError: it cannot be captured.
        """
        refuse_hooks(self.model)
        loss = self.loss_of(loss)
        modes = training_modes(self.model) if modes is None else modes
        with in_modes(self.model, modes):
            cache_key = (modes, batch_size, outputs, self.deferred is None)
            return cached_capture(self.model, loss, batch, cache_key, lambda: self._capture(batch, loss, batch_size, outputs))

    def _capture(self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool) -> CapturedGraph:
        if self.deferred is not None:
            deferred = self.deferred
            captured = capture(self.model, batch, loss, batch_size=batch_size, fake_mode=deferred.fake_mode, outputs=outputs)
            # A tensor that is a plain attribute of the module is captured as a fake tensor; replace it by its value.
            constants = {v: deferred.real_value(t) if deferred.is_fake(t) else t for v, t in captured.constants.items()}
            return replace(captured, constants=constants)
        mode, originals = fake_mode(), dict[int, Tensor]()
        captured = capture(fake_copy(self.model, mode, originals), batch, loss, batch_size=batch_size, fake_mode=mode, outputs=outputs)
        return replace(captured, constants={v: originals.get(id(t), t) for v, t in captured.constants.items()})

    def capture_microbatch(
        self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None
    ) -> CapturedMicrobatch:
        """Capture a microbatch of `size` samples of a batch of `samples`, in the precision of a plan; `modes` as for `capture`."""
        captured = self.capture(batch, loss, size, modes=modes)
        graph = cast_to_precision(captured.graph, plan)
        if plan.layout.replicas * plan.layout.microbatches == 1:
            return CapturedMicrobatch(SummableLossGraph(graph), captured.constants, captured.graph, structure=captured.structure)
        captured_part = replace(captured, graph=graph)

        def capture_size(count: int) -> CapturedGraph:
            if count == size:
                return captured_part
            captured_other = self.capture(batch, loss, count, modes=modes)
            return replace(captured_other, graph=cast_to_precision(captured_other.graph, plan))

        full = capture_size(plan.batch_size)
        step = full if samples == plan.batch_size or depends_on_sizes_only(captured_part, full) else capture_size(samples)
        part = normalise_microbatch(captured_part, full, step, plan.layout.microbatches == 1)
        return replace(part, captured=captured.graph)

    def sharding(self, plan: Plan, graph: Graph) -> Sharding:
        """Return the complete sharding of a graph under a plan."""
        return shard_graph(plan, graph, self.prices)

    def materialize_tensors(self, select: Callable[[str, Tensor], Tensor | None], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Materialise initial values, one tensor at a time; return what `select(name, tensor)` returns, by name."""
        if self.deferred is not None:
            return materialize_shards(self.deferred, self.model, select, dtype)
        return take_real_shards(self.model, select, dtype)

    def initial_buffers(self, initial: InitialValues) -> dict[str, Tensor]:
        """Initialise this rank's parameters in place and return its buffers; only allocate the buffers if there are no values."""
        return self.materialize_tensors(initial.take_local, None) if self.has_values else initial.allocate_buffers()


@dataclass(frozen=True)
class CachedModelSource(ModelSource):
    """A source that caches captures and shardings. Ranks forked from this process inherit the caches and need not trace again."""

    captures: dict[tuple[int | None, bool, Modes], CapturedGraph] = field(default_factory=dict)
    shardings: dict[tuple[object, ...], Sharding] = field(default_factory=dict)
    microbatches: dict[tuple[object, ...], CapturedMicrobatch] = field(default_factory=dict)

    def capture(
        self, batch: Any, loss: Loss | None, batch_size: int | None, outputs: bool = False, modes: Modes | None = None
    ) -> CapturedGraph:
        """Return `ModelSource.capture`, cached by number of samples and modes; the batch and the loss must stay the same."""
        modes = training_modes(self.model) if modes is None else modes
        key = (batch_size, outputs, modes)
        if key not in self.captures:
            self.captures[key] = super().capture(batch, loss, batch_size, outputs, modes)
        return self.captures[key]

    def sharding(self, plan: Plan, graph: Graph) -> Sharding:
        """Return `ModelSource.sharding`, cached by what of the plan it depends on."""
        layout = plan.layout
        key = (
            layout.axes[1:],
            layout.sequence_parallel,
            layout.sample_parallel,
            layout.shares,
            layout.attention,
            plan.shards,
            graph.batch_size,
            layout.precision,
            self.prices,
            len(graph.operators),  # a microbatch has a few more than a whole batch
        )
        if key not in self.shardings:
            self.shardings[key] = shard_graph(plan, graph, self.prices)
        return self.shardings[key]

    def capture_microbatch(
        self, plan: Plan, batch: Any, loss: Loss | None, size: int, samples: int, modes: Modes | None = None
    ) -> CapturedMicrobatch:
        """Return `ModelSource.capture_microbatch`, cached by microbatch size, batch size, precision and modes."""
        layout = plan.layout
        modes = training_modes(self.model) if modes is None else modes
        key = (modes, size, samples, plan.batch_size, DTYPES[layout.precision], layout.replicas == 1, layout.microbatches == 1)
        if key not in self.microbatches:
            self.microbatches[key] = super().capture_microbatch(plan, batch, loss, size, samples, modes)
        return self.microbatches[key]

    def capture_all(self, plan: Plan, batch: Any, loss: Loss | None, modes: Modes | None = None) -> None:
        """Fill the caches with everything that the ranks of a plan will capture, in training or in other `modes`.

        Raises:
            ModelError: the model cannot be captured so.
        """
        if plan.uncaptured:
            return
        first, *other_sizes = plan.microbatch_sizes
        part = self.capture_microbatch(plan, batch, loss, first, plan.batch_size, modes)
        if modes is None:
            self.sharding(plan, part.loss_graph.graph)
        for size in other_sizes:
            self.capture_microbatch(plan, batch, loss, size, plan.batch_size, modes)
        sample_folds(plan, self, part.captured, batch, loss, modes)


def shard_graph(plan: Plan, graph: Graph, prices: Prices | None = None) -> Sharding:
    """Return the complete sharding of a graph under a plan; what the plan leaves open is chosen by `prices`.

    Raises:
        LayoutError: shards over a tensor axis that the layout does not have, or that the graph does not allow.
    """
    cuts = expand_shards(plan.shards, (v.name for v in (*graph.parameters, *graph.buffers)))
    sizes = {axis: n for axis, n in plan.layout.axes if axis_of(axis).shards}
    missing_axes = [axis for axis in cuts if axis in (TENSOR, *GRID_AXES) and axis not in sizes]
    if missing_axes and plan.layout.tensor > 1:
        axis_names = ", ".join(axis for axis, _ in plan.layout.tensor_axes)
        raise LayoutError(
            f"the plan cuts parameters over {', '.join(missing_axes)}, and the tensor ranks of {plan.layout} lie along {axis_names}; "
            f"leave [shards.{missing_axes[0]}] out, or name it after one of these"
        )
    layout = plan.layout
    sequence, samples = layout.sequence_parallel == "on", layout.sample_parallel == "on"
    samples_per_rank = priced_num_samples(-(-plan.batch_size // (layout.data * layout.microbatches)))
    prices = prices or Prices(samples=samples_per_rank * layout.data)
    sharding = propagate(graph, sizes, cuts, prices=prices, sequence=sequence, samples=samples, attention=layout.attention)
    return resize_sample_shards(sharding, graph, sample_shares(layout)) if layout.shares else sharding


def build_rank_model(
    plan: Plan, source: ModelSource, batch: Any, loss: Loss | None, world: World, optimizer: OptimizerSpec, seed: int, outputs: bool = False
) -> RankModel:
    """Capture the model, shard it, cut it into stages, lower this rank's stages and initialise their parameters.

    Raises:
        Infeasible: the world has another number of ranks than the layout, or the batch does not divide.
        ModelError: the model cannot be captured. LayoutError: a choice that can be planned, but not run yet.
        ProgramError: a custom schedule for other links between stages, or one that is proven wrong.
    """
    layout = plan.layout
    mesh = _mesh_of(layout, world)
    first, dtype = plan.microbatch_sizes[0], DTYPES[layout.precision]
    part = capture_outputs(source, plan, batch, first) if outputs else source.capture_microbatch(plan, batch, loss, first, plan.batch_size)
    graph, normal = part.loss_graph.graph, part.loss_graph
    _check_dtypes(graph, layout.precision)
    check_samples(graph, layout)
    stages = normal.split_stages(plan.stages)
    layout.residency.check([list(dict.fromkeys(filter(None, (layer_of(op.site) for op in s.operators)))) or [""] for s in stages])
    program = program_of(plan, stages, world)
    at = mesh.coordinates(world.rank)
    shardings = stage_shardings(plan, source, graph, stages)
    sharding = shardings[at["pipeline"]]  # the same for all stages of a rank
    local_stages, draw = [stages[s] for s in program.stages_of[at["pipeline"]]], DrawState(seed=seed)
    groups = groups_of(graph, sharding, mesh, world)
    rows, arriving = sample_dims_of_outputs(source, batch, graph, sharding) if outputs else {}, frozenset(t.variable for t in normal.totals)
    across = variables_across_meshes(layout, stages) & {v.value for v in graph.parameters}
    shares, from_other_mesh = gradient_shares(across, sharding, mesh), received_across_meshes(layout, local_stages)
    arrival, samples_at = PendingConstants(), sample_folds(plan, source, part.captured, batch, loss)
    lowering = Lowering(
        graph=graph, sharding=sharding, groups=groups, device=world.device, draw_state=draw, output_sample_dims=rows,
            gradient_shares=shares, from_other_meshes=from_other_mesh,
        sample_folds=samples_at, awaited_constants=arriving, pending_constants=arrival, local_statistics=layout.local_statistics_axes,
        precision=PRECISIONS[layout.precision], local_reductions=always_summed_adjustments(layout, graph, sharding, mesh),
    )  # fmt: skip
    lowered = {stage.index: lower(stage, lowering) for stage in local_stages}
    full_variant = MicrobatchVariant(normal, lowered, {}, shardings, sharding)

    def build_variant(size: int, samples: int) -> MicrobatchVariant:
        if (size, samples) == (first, plan.batch_size):
            return full_variant
        resized = capture_outputs(source, plan, batch, size) if outputs else source.capture_microbatch(plan, batch, loss, size, samples)
        # Outputs are always of whole batches.
        its_lowering = (
            lowering if outputs else replace(lowering, sample_folds=samples_at or sample_folds(plan, source, resized.captured, batch, loss))
        )
        return lower_variant(
            full_variant, its_lowering, resized.loss_graph, plan, constants_on_device(resized.constants, world.device, dtype)
        )

    # In a plain loop parameters that the outputs do not depend on may enter the user's loss: loss weights, a temperature.
    trainable = {v.value for v in graph.parameters if v.trainable} if outputs else parameters_with_gradient(graph)
    shards_by_name = zero_shards(graph, sharding) if outputs and layout.zero else {}
    always, per_replica = (
        sample_axes(mesh.stage_axes) if outputs else always_summed_axes(layout),
        layout.servers > 0 or layout.staleness > 0,
    )
    blocks = LocalBlocks(mesh, at, shard_stored_parameters(sharding, graph, shards_by_name), stages, program, across, always, per_replica)
    specs, zero = blocks.local_parameters(graph, trainable, optimizer, dtype, layers_reading(lowered)), 0 if outputs else layout.zero
    flat, parameters = build_groups(list(specs.values()), world.device, zero, world.rank, plan.bucket_bytes, layout.servers_of(world.rank))
    choose_all_reduce(plan, world, flat)
    buffer_blocks = {v.name: (v, blocks.block_ranges(v)) for v in graph.buffers if blocks.is_stored_here(v)}
    buffers = source.initial_buffers(InitialValues(specs, parameters, flat, buffer_blocks, world.device, dtype))
    used_values, tensors = {value for stage in local_stages for value in stage.variables}, {**parameters, **buffers}
    variables: dict[str, Tensor] = {v: t for v, t in constants_on_device(part.constants, world.device, dtype).items() if v in used_values}
    variables |= {v.value: tensors[v.name] for v in (*graph.parameters, *graph.buffers) if v.value in used_values and v.name in tensors}
    return RankModel(
        graph=graph, sharding=sharding, stages=stages, program=program, lowered=lowered, parameters=parameters, local_parameters=specs,
            groups=flat,
        buffers=buffers, buffer_blocks=buffer_blocks, variables=variables, draw=draw, structure=part.structure,
        state_dict_names=frozenset(source.model.state_dict(keep_vars=True)), variant_for=lru_cache(MAX_MICROBATCH_SIZES)(build_variant),
        sample_folds=samples_at,
        shardings=shardings, lowering=lowering, couplings=part.couplings, divisor_inputs=normal.total_inputs, pending_constants=arrival,
        zero_shards=shards_by_name,
    )  # fmt: skip


def _mesh_of(layout: Layout, world: World) -> Mesh:
    """Return the mesh of a layout, after checking that this world has as many ranks."""
    mesh = layout.mesh_of(world.rank)
    if mesh.num_ranks != world.num_ranks:
        raise Infeasible(f"the layout {layout} needs {mesh.num_ranks} ranks, {world.num_ranks} were started")
    return mesh


def sample_folds(
    plan: Plan, source: ModelSource, graph: Graph, batch: Any, loss: Loss | None, modes: Modes | None = None
) -> tuple[SampleFold | None, ...]:
    """Return how samples lie in each random tensor of the model, draw by draw; nothing if a microbatch is the whole batch."""
    sizes = {*plan.microbatch_sizes, plan.batch_size} - {graph.batch_size}
    if not sizes:
        return ()
    other_size = min(sizes)
    return find_sample_folds(graph, lambda: source.capture(batch, loss, other_size, modes=modes).graph)


def _check_dtypes(graph: Graph, precision: str) -> None:
    """Raise ModelError for a trainable parameter whose dtype is not that of the weights under `precision`."""
    expected = str(DTYPES[precision]).removeprefix("torch.")
    for v in graph.parameters:
        if v.trainable and v.tensor.dtype.startswith("complex"):
            raise ModelError(
                f"parameter {v.name} is complex, and the model writes it while it runs, which is not supported yet; keep its real and its "
                "imaginary part as two parameters, and join them with torch.complex in forward"
            )
        if v.trainable and v.tensor.dtype != expected:
            other_precision = next((name for name, dtype in DTYPES.items() if str(dtype).removeprefix("torch.") == v.tensor.dtype), None)
            keep = f"precision={other_precision} trains it as it is, or " if other_precision is not None else ""
            raise ModelError(
                f"parameter {v.name} is {v.tensor.dtype}, and precision={precision} trains weights of {expected}; {keep}make the model in "
                "float32 (model.float()), and choose how it computes by precision=bfloat16"
            )


def sample_dims_of_outputs(source: ModelSource, batch: Any, graph: Graph, sharding: Sharding, modes: Modes | None = None) -> dict[str, int]:
    """Return the sample dimension of each output: the one sharded over sample axes; for a replicated output, the one that doubles in a
    capture with twice the samples (another dimension may have the same length by coincidence)."""
    axes = sharding.sample_axes
    if not axes:  # every rank has all samples
        return {}
    forms = {v: [form for axis in axes if is_shard(form := sharding.placements[v][axis])] for v in graph.outputs}
    dims = {v: sharded[0].dim for v, sharded in forms.items() if sharded}
    if all(v in dims or not graph.tensors[v].shape for v in graph.outputs):
        return dims
    try:
        doubled = source.capture(batch, None, 2 * graph.batch_size, outputs=True, modes=modes).graph
    except ModelError:  # the model has a fixed number of samples
        return {v: 0 for v in graph.outputs if graph.tensors[v].shape[:1] == (graph.batch_size,)}
    for value, other_value in zip(graph.outputs, doubled.outputs, strict=True):
        shape = graph.tensors[value].shape
        grown_dims = [dim for dim, (n, m) in enumerate(zip(shape, doubled.tensors[other_value].shape, strict=True)) if n != m]
        if grown_dims:
            dims[value] = grown_dims[0]
    return dims


def capture_outputs(source: ModelSource, plan: Plan, batch: Any, size: int, modes: Modes | None = None) -> CapturedMicrobatch:
    """Capture a microbatch of a model without a loss, whose outputs are returned as they are."""
    captured = source.capture(batch, None, size, True, modes)
    return CapturedMicrobatch(
        SummableLossGraph(cast_to_precision(captured.graph, plan)), captured.constants, captured.graph, structure=captured.structure
    )


def cast_to_precision(graph: Graph, plan: Plan) -> Graph:
    """Return the graph in the dtype that a plan computes in."""
    return graph.cast("float64") if DTYPES[plan.layout.precision] is torch.float64 else graph
