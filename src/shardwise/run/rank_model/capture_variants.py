"""Capture further variants of a model (evaluation mode, other batch shapes) over the parameters and buffers that training already holds.

In: this rank's model, the model's source, a request. Out: a `RankModel` with another graph, lowered over the same sharded tensors. A model
may compute something else in evaluation (no dropout, running statistics, another branch) or for other tensors or shapes, so each variant is
a graph of its own, captured lazily by every rank for itself. A graph with the same operators keeps the training sharding; for another
one the sharding follows from how parameters are sharded.

Not supported: a variant that reads a parameter on another pipeline stage than training does; it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from shardwise.capture.capture import Loss
from shardwise.capture.modes import Modes
from shardwise.errors import Infeasible, ModelError
from shardwise.lower.kernels.paged import PagedCache
from shardwise.lower.local import Lowering, lower
from shardwise.lower.lowering import LocalGradientReduction, groups_of
from shardwise.model.batch.samples import check_samples
from shardwise.model.gradients import parameters_with_gradient
from shardwise.model.graph import Graph
from shardwise.model.sharding.sample_shards import resize_sample_shards
from shardwise.model.sharding.sharding import Sharding, Shards
from shardwise.model.stages.stages import Stage
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.plan import Plan
from shardwise.run.parts.lru_cache import MAX_MICROBATCH_SIZES
from shardwise.run.parts.microbatch_variants import (
    MicrobatchVariant,
    check_divisible,
    check_same_operators,
    constants_on_device,
    lower_variant,
    sample_shares,
)
from shardwise.run.parts.rank_model import RankModel, program_of
from shardwise.run.parts.stage_meshes import (
    always_summed_axes,
    gradient_adjustment,
    gradient_shares,
    received_across_meshes,
    stage_shardings,
    variables_across_meshes,
)
from shardwise.run.rank_model.build import ModelSource, capture_outputs, sample_dims_of_outputs, sample_folds
from shardwise.run.state.precision import DTYPES
from shardwise.world.world import World


@dataclass(frozen=True)
class CaptureRequest:
    """Request to capture the model in `modes` on a batch of this form. `runs_backward`: with gradients that ranks reduce as in the plan.
    `returns_outputs`: stop at the model's outputs, without a loss. `microbatch_size`, `batch_size`: in samples, by default the plan's.
    `is_replicated`: every replica computes all samples instead of its share. `gathers_outputs`: every rank gets the outputs of all samples.
    `kv_pages`: of a decoder, the pages in which its attention finds the keys and values of earlier tokens."""

    modes: Modes
    batch: Any
    loss: Loss | None = None
    runs_backward: bool = False
    returns_outputs: bool = False
    microbatch_size: int = 0
    batch_size: int = 0
    is_replicated: bool = False
    gathers_outputs: bool = False
    kv_pages: PagedCache | None = None


def build_capture_variant(request: CaptureRequest, rank_model: RankModel, plan: Plan, source: ModelSource, world: World) -> RankModel:
    """Return the model captured as requested, over the tensors of `rank_model` and with the same random state.

    Raises:
        ModelError: the capture fails, a stage reads a parameter of another one, or a parameter has a gradient that has none in training.
        Infeasible, LayoutError, ProgramError: the plan does not suit the graph.
    """
    modes, batch, loss, outputs = request.modes, request.batch, request.loss, request.returns_outputs
    if request.kv_pages is not None:  # a step may have fewer tokens than ranks
        plan = replace(plan, layout=replace(plan.layout, sequence_parallel="off"))
    first, samples = request.microbatch_size or plan.microbatch_sizes[0], request.batch_size or request.microbatch_size or plan.batch_size
    part = (
        capture_outputs(source, plan, batch, first, modes)
        if outputs
        else source.capture_microbatch(plan, batch, loss, first, samples, modes)
    )
    graph, normal = part.loss_graph.graph, part.loss_graph
    check_samples(graph, plan.layout)
    sites = _stage_sites_in(plan.stages, rank_model.graph, graph)
    stages = normal.split_stages(sites, request.runs_backward)
    program = program_of(plan, stages, world)
    mesh = plan.layout.mesh_of(world.rank)
    coordinates = mesh.coordinates(world.rank)
    shardings = _stage_shardings_of(rank_model, plan, source, graph, stages, mesh, request.is_replicated)
    sharding = shardings[coordinates["pipeline"]]
    local_stages = [stages[s] for s in program.stages_of[coordinates["pipeline"]]]
    groups = groups_of(graph, sharding, mesh, world)
    rows = sample_dims_of_outputs(source, batch, graph, sharding, modes) if outputs and not request.gathers_outputs else {}
    samples_at = () if outputs else sample_folds(plan, source, part.captured, batch, loss, modes)  # outputs are always of whole batches
    arriving = frozenset(total.variable for total in normal.totals)
    foreign = received_across_meshes(plan.layout, local_stages)
    across = variables_across_meshes(plan.layout, stages) & {v.value for v in graph.parameters} if request.runs_backward else frozenset()
    shares, entering = gradient_shares(across, sharding, mesh), {}
    if request.runs_backward:
        entering = _gradient_adjustments(rank_model, graph, sharding, mesh, across, always_summed_axes(plan.layout))
    statistics, precision = plan.layout.local_statistics_axes, PRECISIONS[plan.layout.precision]
    lowering = Lowering(
        graph=graph, sharding=sharding, groups=groups, device=world.device, draw_state=rank_model.draw, output_sample_dims=rows,
            gradient_shares=shares, from_other_meshes=foreign,
        sample_folds=samples_at, awaited_constants=arriving, pending_constants=rank_model.pending_constants, local_statistics=statistics,
        precision=precision, local_reductions=entering,
        pages=request.kv_pages,
    )  # fmt: skip
    lowered = {stage.index: lower(stage, lowering) for stage in local_stages}
    dtype, base_variant = DTYPES[plan.layout.precision], MicrobatchVariant(normal, lowered, {}, shardings, sharding)
    resited_plan = replace(plan, stages=tuple(sites))

    def build_variant(size: int, count: int) -> MicrobatchVariant:
        if (size, count) == (first, samples):
            return base_variant
        resized = (
            capture_outputs(source, plan, batch, size, modes)
            if outputs
            else source.capture_microbatch(plan, batch, loss, size, count, modes)
        )
        where_drawn = () if outputs else samples_at or sample_folds(plan, source, resized.captured, batch, loss, modes)
        variant_lowering = replace(lowering, sample_folds=where_drawn)
        return lower_variant(
            base_variant, variant_lowering, resized.loss_graph, resited_plan, constants_on_device(resized.constants, world.device, dtype)
        )

    variables = _existing_variables(rank_model, graph, sharding, local_stages, coordinates)
    used_values = {value for stage in local_stages for value in stage.variables}
    variables |= {v: t for v, t in constants_on_device(part.constants, world.device, dtype).items() if v in used_values}
    return replace(
        rank_model, graph=graph, sharding=sharding, stages=stages, program=program, lowered=lowered, variables=variables,
        structure=part.structure, variant_for=lru_cache(MAX_MICROBATCH_SIZES)(build_variant), sample_folds=samples_at,
        shardings=shardings, lowering=lowering,
        couplings=part.couplings, divisor_inputs=normal.total_inputs,
    )  # fmt: skip


def _sharded_axis_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: n for axis, n in sizes.items() if n > 1 and axis_of(axis).shards}


def _stage_shardings_of(
    rank_model: RankModel, plan: Plan, source: ModelSource, graph: Graph, stages: Sequence[Stage], mesh: Mesh, is_replicated: bool
) -> tuple[Sharding, ...]:
    """Return a graph's sharding for each pipeline rank: the training one if operators agree and tensors divide, else a new one."""
    if is_replicated:
        plan = replace(plan, layout=replace(plan.layout, data=1))
    elif rank_model.lowering is not None and _sharded_axis_sizes(rank_model.sharding.sizes) == _sharded_axis_sizes(dict(mesh.axes)):
        try:
            check_same_operators(rank_model.lowering, graph)
            resized = {id(sharding): resize_sample_shards(sharding, graph, sample_shares(plan.layout)) for sharding in rank_model.shardings}
            for sharding in resized.values():
                check_divisible(sharding, graph)
            return tuple(resized[id(sharding)] for sharding in rank_model.shardings)
        except Infeasible:
            pass
    # Not through `source` itself: its cached sharding is that of training.
    return stage_shardings(
        replace(plan, shards=_parameter_shards(rank_model)), ModelSource(source.model, source.deferred, source.prices), graph, stages
    )


def _existing_variables(
    rank_model: RankModel, graph: Graph, sharding: Sharding, local_stages: Sequence[Stage], coordinates: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the existing parameters and buffers that this rank's stages read, by graph value."""
    used_values = {value for stage in local_stages for value in stage.variables}
    tensors = {**rank_model.buffers, **rank_model.parameters}
    variables: dict[str, Tensor] = {}
    for v in (*graph.parameters, *graph.buffers):
        if v.value not in used_values:
            continue
        if v.name not in tensors:
            stage = next(stage.index for stage in local_stages if v.value in stage.variables)
            raise ModelError(
                f"stage {stage} of the pipeline reads {v.name} here, and in training another one does, which is not supported yet; "
                "evaluate the serial model from engine.full_state_dict(), or use a layout without a pipeline"
            )
        expected, stored, zero_shard = (
            sharding.local_shape(v.value, v.tensor.shape, coordinates=coordinates),
            tensors[v.name].shape,
            rank_model.zero_shards.get(v.name),
        )
        if [n for dim, n in enumerate(stored) if zero_shard is None or dim != zero_shard.dim] != [
            n for dim, n in enumerate(expected) if zero_shard is None or dim != zero_shard.dim
        ]:
            raise ModelError(f"{v.name} is used differently than in training and would be sharded differently, which is not supported yet")
        variables[v.value] = tensors[v.name]
    return variables


def _gradient_adjustments(
    rank_model: RankModel, graph: Graph, sharding: Sharding, mesh: Mesh, across: AbstractSet[str], always_summed_axes: Sequence[str]
) -> dict[str, LocalGradientReduction]:
    """Return how parameter gradients are adjusted so that they can be reduced over the axes of training and the always-reduced axes.

    Raises:
        ModelError: a parameter has a gradient that has none in training; raised on every rank.
    """
    with_gradient, with_training_gradient = (
        parameters_with_gradient(graph),
        {v.name for v in rank_model.graph.parameters if v.value in parameters_with_gradient(rank_model.graph)},
    )
    adjustments = {}
    for v in graph.parameters:
        if v.value not in with_gradient or v.value in across:
            continue
        if v.name not in with_training_gradient:
            raise ModelError(
                f"{v.name} learns from a batch of this form, and does not from the one that the model was divided with; divide it with a "
                "batch from which every parameter learns"
            )
        if v.name in rank_model.local_parameters and (
            adjustment := gradient_adjustment(
                v.value, {*rank_model.local_parameters[v.name].reduction_axes, *always_summed_axes}, sharding, mesh
            )
        ):
            adjustments[v.value] = adjustment
    return adjustments


def _parameter_shards(rank_model: RankModel) -> tuple[tuple[str, Shards], ...]:
    """Return how parameters and buffers are sharded along every axis."""
    widest = max((*rank_model.shardings, rank_model.sharding), key=lambda sharding: sum(map(len, sharding.shards.values())))
    return tuple(widest.shards.items())


def _stage_sites_in(sites: Sequence[str], training: Graph, graph: Graph) -> list[str]:
    """Return the first site of every stage in `graph`: the one of training, or the next later site that `graph` has."""
    order = list(training.index_of_site)
    first_sites = []
    for site in sites:
        later_sites = (later_site for later_site in order[training.index_of_site[site] :] if later_site in graph.index_of_site)
        first_sites.append(next(later_sites, site))
    return first_sites
