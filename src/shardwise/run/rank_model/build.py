"""Build one rank's model from a plan: capture the graph, shard it, cut it into stages, lower this rank's, initialise its parameters.

In: a `BuildRequest`: a plan, a model, a batch and the loss. Out: the `RankModel` that the engine runs. Every rank does this by itself from
the same inputs (SPMD), so that only gradients and activations are ever sent. A model may compute something else in evaluation (no dropout,
running statistics, another branch) or for other tensors or shapes, so each of these is captured as a graph of its own and lowered over the
tensors that training already holds, lazily.

Not supported: a graph that reads a parameter on another pipeline stage than training does; it is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.capture.capture import Loss
from shardwise.capture.modes import Modes
from shardwise.capture.unsupported_models import refuse_sparse_batch
from shardwise.errors import Infeasible, ModelError
from shardwise.lower.kernels.paged import PagedCache
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import Lowering, layer_of, lower
from shardwise.lower.lowering import groups_of
from shardwise.model.batch.random_draws import SampleFold
from shardwise.model.batch.samples import check_samples
from shardwise.model.batch.summable_loss import SummableLossGraph
from shardwise.model.chunked_loss import has_chunkable_loss
from shardwise.model.gradients import parameters_with_gradient
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding, refuse_idle_axes
from shardwise.model.stages.stages import Stage
from shardwise.model.strides.autocast_dtypes import narrow_parameters
from shardwise.plan.ir.axis import axis_of, sample_axes
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import is_shard
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.plan import Plan
from shardwise.run.parts.local_blocks import InitialValues, LocalBlocks, shard_stored_parameters, zero_shards
from shardwise.run.parts.lru_cache import MAX_MICROBATCH_SIZES
from shardwise.run.parts.microbatch_variants import MicrobatchVariant, lower_variant, resize_shardings
from shardwise.run.parts.rank_model import RankModel, program_of
from shardwise.run.parts.stage_meshes import (
    always_summed_axes,
    gradient_adjustments,
    gradient_shares,
    received_across_meshes,
    stage_shardings,
    variables_across_meshes,
)
from shardwise.run.rank_model.model_source import CapturedMicrobatch, ModelSource, cast_to_precision, sample_folds
from shardwise.run.residency.layer_modules import layers_reading
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.state.parameters import build_groups, choose_all_reduce
from shardwise.run.state.precision import DTYPES
from shardwise.world.world import World


@dataclass(frozen=True)
class BuildRequest:
    """A request to capture a model in `modes` (by default those of training) on a batch of this form, and to build this rank's part of it.

    `optimizer`, `seed`: of new weights. `runs_backward`: with gradients that ranks reduce as in the plan. `returns_outputs`: stop at the
    model's outputs, without a loss. `microbatch_size`, `batch_size`: in samples, by default the plan's. `is_replicated`: every replica
    computes all samples instead of its share. `gathers_outputs`: every rank gets the outputs of all samples. `kv_pages`: of a decoder, the
    pages in which its attention finds the keys and values of earlier tokens.
    """

    plan: Plan
    source: ModelSource
    batch: Any
    loss: Loss | None
    world: World
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    seed: int = 0
    modes: Modes | None = None
    runs_backward: bool = True
    returns_outputs: bool = False
    microbatch_size: int = 0
    batch_size: int = 0
    is_replicated: bool = False
    gathers_outputs: bool = False
    kv_pages: PagedCache | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """Number of samples of a microbatch and of its batch."""
        size = self.microbatch_size or self.plan.microbatch_sizes[0]
        return size, self.batch_size or self.microbatch_size or self.plan.batch_size

    @property
    def mesh(self) -> Mesh:
        """Mesh of the layout. Raises Infeasible if the world has another number of ranks."""
        layout, world = self.plan.layout, self.world
        mesh = layout.mesh_of(world.rank)
        if mesh.num_ranks != world.num_ranks:
            raise Infeasible(f"the layout {layout} needs {mesh.num_ranks} ranks, {world.num_ranks} were started")
        return mesh

    def capture(self, size: int, samples: int) -> CapturedMicrobatch:
        """Capture a microbatch of `size` samples of a batch of `samples`; outputs are always of whole batches, and returned as they are."""
        if not self.returns_outputs:
            return self.source.capture_microbatch(self.plan, self.batch, self.loss, size, samples, self.modes)
        captured = self.source.capture(self.batch, None, size, True, self.modes)
        loss_graph = SummableLossGraph(cast_to_precision(captured.graph, self.plan))
        return CapturedMicrobatch(loss_graph, captured.constants, captured.graph, structure=captured.structure)

    def sample_folds(self, part: CapturedMicrobatch) -> tuple[SampleFold | None, ...]:
        """Return how samples lie in each random tensor of a capture, draw by draw."""
        return () if self.returns_outputs else sample_folds(self.plan, self.source, part.captured, self.batch, self.loss, self.modes)

    def constants_on_device(self, part: CapturedMicrobatch) -> dict[str, Tensor]:
        """Move constants of a capture to the device, by graph value; float32 becomes float64 in double precision."""
        constants = {value: tensor.to(self.world.device) for value, tensor in part.constants.items()}
        if DTYPES[self.plan.layout.precision] is torch.float64:
            constants = {value: t.double() if t.dtype is torch.float32 else t for value, t in constants.items()}
        return constants


def build_rank_model(request: BuildRequest, tensors: RankModel | None = None) -> RankModel:
    """Capture the model, shard it, cut it into stages, lower this rank's stages and initialise their parameters.

    With `tensors`: over the parameters and buffers of that model instead, and with its random state. A graph with the same operators keeps
    the sharding of that model; for another one it follows from how parameters are sharded.

    Raises:
        Infeasible: the world has another number of ranks than the layout, or the batch does not divide.
        ModelError: the model cannot be captured, or reads or trains other parameters than that of `tensors`.
        LayoutError: a choice that can be planned, but not run yet.
        ProgramError: a custom schedule for other links between stages, or one that is proven wrong.
    """
    if request.world.num_ranks > 1 or not request.returns_outputs:
        refuse_sparse_batch(request.batch)
    mesh = request.mesh  # before the capture: a world of another size is refused at once
    request, part = _capture(request, tensors)
    plan, world, loss_graph, graph = request.plan, request.world, part.loss_graph, part.loss_graph.graph
    layout, at = plan.layout, mesh.coordinates(world.rank)
    stages = loss_graph.split_stages(plan.stages, request.runs_backward)
    if tensors is None:
        layout.residency.check([list(dict.fromkeys(filter(None, (layer_of(op.site) for op in s.operators)))) or [""] for s in stages])
    program = program_of(plan, stages, world)
    shardings = _shardings_of(request, tensors, graph, stages)
    sharding = shardings[at["pipeline"]]  # the same for all stages of a rank
    if tensors is None and not layout.inner:
        refuse_idle_axes(sharding, graph.parameter_shapes)
    local_stages = [stages[s] for s in program.stages_of[at["pipeline"]]]
    across = variables_across_meshes(layout, stages) & {v.value for v in graph.parameters} if request.runs_backward else frozenset()
    reduced_axes = _reduced_axes(tensors, graph, sharding, across) if request.runs_backward else {}
    base = tensors or RankModel(graph, sharding, stages, program, draw=DrawState(seed=request.seed))
    folds = request.sample_folds(part)
    lowering = Lowering(
        graph=graph, sharding=sharding, groups=groups_of(graph, sharding, mesh, world), device=world.device, draw_state=base.draw,
        output_sample_dims=_sample_dims_of_outputs(request, graph, sharding), gradient_shares=gradient_shares(across, sharding, mesh),
        from_other_meshes=received_across_meshes(layout, local_stages), sample_folds=folds,
        training_graph=base.graph, awaited_constants=frozenset(total.variable for total in loss_graph.totals),
        pending_constants=base.pending_constants,
        local_statistics=layout.local_statistics_axes, precision=PRECISIONS[layout.precision],
        local_reductions=gradient_adjustments(reduced_axes, layout, sharding, mesh), pages=request.kv_pages,
        loss_chunks=_loss_chunks_of(request, graph, tensors),
    )  # fmt: skip
    lowered = {stage.index: lower(stage, lowering) for stage in local_stages}
    base_variant = MicrobatchVariant(loss_graph, lowered, {}, shardings, sharding)

    def build_variant(size: int, samples: int) -> MicrobatchVariant:
        if (size, samples) == request.sizes:
            return base_variant
        resized = request.capture(size, samples)
        its_lowering = replace(lowering, sample_folds=folds or request.sample_folds(resized))
        return lower_variant(base_variant, its_lowering, resized.loss_graph, plan, request.constants_on_device(resized))

    rank_model = replace(
        base, graph=graph, sharding=sharding, stages=stages, program=program, lowered=lowered, structure=part.structure,
        variant_for=lru_cache(MAX_MICROBATCH_SIZES)(build_variant), sample_folds=folds, shardings=shardings,
        lowering=lowering, couplings=part.couplings, divisor_inputs=loss_graph.total_inputs,
    )  # fmt: skip
    if tensors is None:
        rank_model = _with_new_tensors(rank_model, request, across)
    constants = request.constants_on_device(part)
    return replace(rank_model, variables=_variables_of(rank_model, local_stages, at, constants, is_new=tensors is None))


def _loss_chunks_of(request: BuildRequest, graph: Graph, tensors: RankModel | None) -> int:
    """Return the chunks of the graph's losses: those of the layout, if it has such losses; one that is trained must."""
    has_losses = not request.returns_outputs and (tensors is None or has_chunkable_loss(graph))
    return request.plan.layout.loss_chunks if has_losses else 1


def _capture(request: BuildRequest, tensors: RankModel | None) -> tuple[BuildRequest, CapturedMicrobatch]:
    """Capture what a request asks for, and check it; return it with the request whose plan has the sites of this graph."""
    plan = request.plan
    if request.kv_pages is not None:  # a step may have fewer tokens than ranks
        plan = replace(plan, layout=replace(plan.layout, sequence_parallel="off"))
        request = replace(request, plan=plan)
    part = request.capture(*request.sizes)
    graph = part.loss_graph.graph
    if tensors is None:
        _check_dtypes(graph, plan.layout.precision)
    else:
        request = replace(request, plan=replace(plan, stages=tuple(_stage_sites_in(plan.stages, tensors.graph, graph))))
    check_samples(graph, plan.layout)
    return request, part


def _shardings_of(request: BuildRequest, tensors: RankModel | None, graph: Graph, stages: Sequence[Stage]) -> tuple[Sharding, ...]:
    """Return a graph's sharding for each pipeline rank: that of `tensors` if operators agree and tensors divide, else a new one."""
    plan, source = request.plan, request.source
    if tensors is None:
        return stage_shardings(plan, source, graph, stages)
    if request.is_replicated:
        plan = replace(plan, layout=replace(plan.layout, data=1))
    elif _sharded_axis_sizes(tensors.sharding.sizes) == _sharded_axis_sizes(dict(request.mesh.axes)):
        with suppress(Infeasible):
            return resize_shardings(tensors.shardings, tensors.graph, graph, plan.layout)
    widest = max((*tensors.shardings, tensors.sharding), key=lambda sharding: sum(map(len, sharding.shards.values())))
    # Not through `source` itself: its cached sharding is that of training.
    uncached = ModelSource(source.model, source.deferred, source.prices)
    return stage_shardings(replace(plan, shards=tuple(widest.shards.items())), uncached, graph, stages)


def _sharded_axis_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: n for axis, n in sizes.items() if n > 1 and axis_of(axis).shards}


def _stage_sites_in(sites: Sequence[str], training: Graph, graph: Graph) -> list[str]:
    """Return the first site of every stage in `graph`: the one of training, or the next later site that `graph` has."""
    order = list(training.index_of_site)
    first_sites = []
    for site in sites:
        later_sites = (later_site for later_site in order[training.index_of_site[site] :] if later_site in graph.index_of_site)
        first_sites.append(next(later_sites, site))
    return first_sites


def _reduced_axes(tensors: RankModel | None, graph: Graph, sharding: Sharding, across: AbstractSet[str]) -> dict[str, Collection[str]]:
    """Return the axes along which each parameter's gradient is reduced, by graph value: the partial ones, or those of `tensors`.

    Raises:
        ModelError: a parameter has a gradient that has none in `tensors`; raised on every rank.
    """
    if tensors is None:
        return {v.value: sharding.gradient_axes.get(v.value, ()) for v in graph.parameters}
    with_gradient, with_training_gradient = parameters_with_gradient(graph), parameters_with_gradient(tensors.graph)
    trained_names = {v.name for v in tensors.graph.parameters if v.value in with_training_gradient}
    trained = [v for v in graph.parameters if v.value in with_gradient and v.value not in across]
    for v in trained:
        if v.name not in trained_names:
            raise ModelError(
                f"{v.name} learns from a batch of this form, and does not from the one that the model was divided with; divide it with a "
                "batch from which every parameter learns"
            )
    return {v.value: tensors.local_parameters[v.name].reduction_axes for v in trained if v.name in tensors.local_parameters}


def _with_new_tensors(rank_model: RankModel, request: BuildRequest, across: AbstractSet[str]) -> RankModel:
    """Return the model with parameters and buffers of its stages, allocated and initialised. `across`: variables of several meshes."""
    plan, layout, world, mesh, outputs = request.plan, request.plan.layout, request.world, request.mesh, request.returns_outputs
    graph, sharding, dtype = rank_model.graph, rank_model.sharding, DTYPES[layout.precision]
    # In a plain loop parameters that the outputs do not depend on may enter the user's loss: loss weights, a temperature.
    trainable = {v.value for v in graph.parameters if v.trainable} if outputs else parameters_with_gradient(graph)
    shards_by_name = zero_shards(graph, sharding) if outputs and layout.zero else {}
    blocks = LocalBlocks(
        mesh,
        mesh.coordinates(world.rank),
        shard_stored_parameters(sharding, graph, shards_by_name),
        rank_model.stages,
        rank_model.program,
        across,
        always_summed_axes=sample_axes(mesh.stage_axes) if outputs else always_summed_axes(layout),
        updates_per_replica=layout.servers > 0 or layout.staleness > 0,
    )
    specs = blocks.local_parameters(graph, trainable, request.optimizer, dtype, layers_reading(rank_model.lowered))
    if (held := PRECISIONS[layout.precision].held_dtype) and not outputs:  # a loop's optimizer updates the weights themselves
        dtypes = {"held_dtype": getattr(torch, held), "gradient_dtype": getattr(torch, layout.gradients)}
        specs.update({name: replace(specs[name], **dtypes) for name in narrow_parameters(graph) & specs.keys()})
    zero, servers = 0 if outputs else layout.zero, layout.servers_of(world.rank)
    groups, parameters = build_groups(list(specs.values()), world.device, zero, world.rank, plan.bucket_bytes, servers, layout.zero_groups)
    choose_all_reduce(plan, world, groups)
    buffer_blocks = {v.name: (v, blocks.block_ranges(v)) for v in graph.buffers if blocks.is_stored_here(v)}
    buffers = request.source.initial_buffers(InitialValues(specs, parameters, groups, buffer_blocks, world.device, dtype))
    for group in groups:
        if (held_dtype := group.members[0].held_dtype) is not None:
            group.hold_weights(held_dtype, parameters)
    return replace(
        rank_model,
        parameters=parameters,
        local_parameters=specs,
        groups=groups,
        buffers=buffers,
        buffer_blocks=buffer_blocks,
        state_dict_names=frozenset(request.source.model.state_dict(keep_vars=True)),
        zero_shards=shards_by_name,
    )


def _variables_of(
    rank_model: RankModel, local_stages: Sequence[Stage], coordinates: Mapping[str, int], constants: Mapping[str, Tensor], is_new: bool
) -> dict[str, Tensor]:
    """Return the parameters, buffers and constants that this rank's stages read, by graph value; of a new model those of its own branches.

    Raises:
        ModelError: this rank does not have one of them, or not the shard that is read.
    """
    graph, zero_shards = rank_model.graph, rank_model.zero_shards
    used_values = {value for stage in local_stages for value in stage.variables}
    tensors = {**rank_model.buffers, **rank_model.parameters}
    variables = {value: tensor for value, tensor in constants.items() if value in used_values}
    for v in (*graph.parameters, *graph.buffers):
        if v.value not in used_values or (is_new and v.name not in tensors):  # another rank owns the branch that reads it
            continue
        if v.name not in tensors:
            stage = next(stage.index for stage in local_stages if v.value in stage.variables)
            raise ModelError(
                f"stage {stage} of the pipeline reads {v.name} here, and in training another one does, which is not supported yet; "
                "evaluate the serial model from engine.full_state_dict(), or use a layout without a pipeline"
            )
        expected = rank_model.sharding.local_shape(v.value, v.tensor.shape, coordinates=coordinates)
        zero_dim = zero_shards[v.name].dim if v.name in zero_shards else None  # stored in fewer rows than it is read in
        shapes = [[n for dim, n in enumerate(shape) if dim != zero_dim] for shape in (tensors[v.name].shape, expected)]
        if shapes[0] != shapes[1]:
            raise ModelError(f"{v.name} is used differently than in training and would be sharded differently, which is not supported yet")
        variables[v.value] = tensors[v.name]
    return variables


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


def _sample_dims_of_outputs(request: BuildRequest, graph: Graph, sharding: Sharding) -> dict[str, int]:
    """Return the sample dimension of each output: the one sharded over sample axes; for a replicated output, the one that doubles in a
    capture with twice the samples (another dimension may have the same length by coincidence)."""
    axes = sharding.sample_axes
    if not axes or not request.returns_outputs or request.gathers_outputs:  # every rank has all samples
        return {}
    forms = {v: [form for axis in axes if is_shard(form := sharding.placements[v][axis])] for v in graph.outputs}
    dims = {v: sharded[0].dim for v, sharded in forms.items() if sharded}
    if all(v in dims or not graph.tensors[v].shape for v in graph.outputs):
        return dims
    try:
        doubled = request.source.capture(request.batch, None, 2 * graph.batch_size, outputs=True, modes=request.modes).graph
    except ModelError:  # the model has a fixed number of samples
        return {v: 0 for v in graph.outputs if graph.tensors[v].shape[:1] == (graph.batch_size,)}
    for value, other_value in zip(graph.outputs, doubled.outputs, strict=True):
        shape = graph.tensors[value].shape
        grown_dims = [dim for dim, (n, m) in enumerate(zip(shape, doubled.tensors[other_value].shape, strict=True)) if n != m]
        if grown_dims:
            dims[value] = grown_dims[0]
    return dims
