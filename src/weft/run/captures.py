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

from weft.capture.capture import Loss
from weft.capture.modes import Modes
from weft.errors import Infeasible, ModelError
from weft.lower.groups import groups_of
from weft.lower.kernels.paged import Pages
from weft.lower.local import Lowering, lower
from weft.lower.lowering import Entering
from weft.model.batch.samples import check_samples
from weft.model.gradients import learned
from weft.model.graph import Graph
from weft.model.sharding.sample_pieces import with_samples_of
from weft.model.sharding.sharding import Sharding, Shards
from weft.model.stages.stages import Stage
from weft.plan.axis import axis_of
from weft.plan.mesh import Mesh
from weft.plan.plan import Plan
from weft.plan.precision import PRECISIONS
from weft.run.build import Source, folds, outputs_of, rows_of_outputs
from weft.run.meshes import always_summed, between_meshes, entering_of, from_other_meshes, shares_of, stage_shardings
from weft.run.recent import MOST_SIZES
from weft.run.resized import Sized, check_divides, check_operators, constants_of, shares_of_samples, sized
from weft.run.state.precision import DTYPES
from weft.run.training_parts import Parts, program_of
from weft.world.world import World


@dataclass(frozen=True)
class Asked:
    """Request to capture the model in `modes` on a batch of this form. `runs_backward`: with gradients that ranks reduce as in the plan.
    `returns_outputs`: stop at the model's outputs, without a loss. `microbatch_size`, `batch_size`: in samples, by default the plan's.
    `is_replicated`: every replica computes all samples instead of its share. `gathers_outputs`: every rank gets the outputs of all samples.
    `kv_pages`: of a decoder, the pages in which its attention finds the keys and values of earlier tokens."""

    modes: Modes
    batch: Any
    loss: Loss | None = None
    trains: bool = False
    outputs: bool = False
    size: int = 0
    samples: int = 0
    replicated: bool = False
    together: bool = False
    pages: Pages | None = None


def captured_in(asked: Asked, parts: Parts, plan: Plan, source: Source, world: World) -> Parts:
    """Return the model captured as requested, over the tensors of `rank_model` and with the same random state.

    Raises:
        ModelError: the capture fails, a stage reads a parameter of another one, or a parameter has a gradient that has none in training.
        Infeasible, LayoutError, ProgramError: the plan does not suit the graph.
    """
    modes, batch, loss, outputs = asked.modes, asked.batch, asked.loss, asked.outputs
    if asked.pages is not None:  # a step may have fewer tokens than ranks
        plan = replace(plan, layout=replace(plan.layout, sequence_parallel="off"))
    first, samples = asked.size or plan.microbatch_sizes[0], asked.samples or asked.size or plan.batch_size
    part = outputs_of(source, plan, batch, first, modes) if outputs else source.part(plan, batch, loss, first, samples, modes)
    graph, normal = part.normal.graph, part.normal
    check_samples(graph, plan.layout)
    sites = _begins(plan.stages, parts.graph, graph)
    stages = normal.stages(sites, asked.trains)
    program = program_of(plan, stages, world)
    mesh = plan.layout.mesh_of(world.rank)
    coordinates = mesh.coordinates(world.rank)
    shardings = _shardings(parts, plan, source, graph, stages, mesh, asked.replicated)
    sharding = shardings[coordinates["pipeline"]]
    local_stages = [stages[s] for s in program.stages_of[coordinates["pipeline"]]]
    groups = groups_of(graph, sharding, mesh, world)
    rows = rows_of_outputs(source, batch, graph, sharding, modes) if outputs and not asked.together else {}
    samples_at = () if outputs else folds(plan, source, part.captured, batch, loss, modes)  # outputs are always of whole batches
    arriving = frozenset(total.variable for total in normal.totals)
    foreign = from_other_meshes(plan.layout, local_stages)
    across = between_meshes(plan.layout, stages) & {v.value for v in graph.parameters} if asked.trains else frozenset()
    shares, entering = shares_of(across, sharding, mesh), {}
    if asked.trains:
        entering = _entering(parts, graph, sharding, mesh, across, always_summed(plan.layout))
    statistics, precision = plan.layout.local_statistics, PRECISIONS[plan.layout.precision]
    lowering = Lowering(
        graph=graph, sharding=sharding, groups=groups, device=world.device, draw=parts.draw, rows=rows, shares=shares, apart=foreign,
        folds=samples_at, awaited=arriving, arrival=parts.arrival, local_statistics=statistics, precision=precision, entering=entering,
        pages=asked.pages,
    )  # fmt: skip
    lowered = {stage.index: lower(stage, lowering) for stage in local_stages}
    dtype, base_variant = DTYPES[plan.layout.precision], Sized(normal, lowered, {}, shardings, sharding)
    resited_plan = replace(plan, stages=tuple(sites))

    def build_variant(size: int, count: int) -> Sized:
        if (size, count) == (first, samples):
            return base_variant
        resized = outputs_of(source, plan, batch, size, modes) if outputs else source.part(plan, batch, loss, size, count, modes)
        where_drawn = () if outputs else samples_at or folds(plan, source, resized.captured, batch, loss, modes)
        variant_lowering = replace(lowering, folds=where_drawn)
        return sized(base_variant, variant_lowering, resized.normal, resited_plan, constants_of(resized.constants, world.device, dtype))

    variables = _variables(parts, graph, sharding, local_stages, coordinates)
    used_values = {value for stage in local_stages for value in stage.variables}
    variables |= {v: t for v, t in constants_of(part.constants, world.device, dtype).items() if v in used_values}
    return replace(
        parts, graph=graph, sharding=sharding, stages=stages, program=program, lowered=lowered, variables=variables,
        structure=part.structure, sized=lru_cache(MOST_SIZES)(build_variant), folds=samples_at, shardings=shardings, lowering=lowering,
        coupled=part.coupled, counted=normal.counted_from,
    )  # fmt: skip


def _cut_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: n for axis, n in sizes.items() if n > 1 and axis_of(axis).cuts}


def _shardings(
    parts: Parts, plan: Plan, source: Source, graph: Graph, stages: Sequence[Stage], mesh: Mesh, replicated: bool
) -> tuple[Sharding, ...]:
    """Return a graph's sharding for each pipeline rank: the training one if operators agree and tensors divide, else a new one."""
    if replicated:
        plan = replace(plan, layout=replace(plan.layout, data=1))
    elif parts.lowering is not None and _cut_sizes(parts.sharding.sizes) == _cut_sizes(dict(mesh.axes)):
        try:
            check_operators(parts.lowering, graph)
            resized = {id(sharding): with_samples_of(sharding, graph, shares_of_samples(plan.layout)) for sharding in parts.shardings}
            for sharding in resized.values():
                check_divides(sharding, graph)
            return tuple(resized[id(sharding)] for sharding in parts.shardings)
        except Infeasible:
            pass
    # Not through `source` itself: its cached sharding is that of training.
    return stage_shardings(replace(plan, shards=_cuts(parts)), Source(source.model, source.deferred, source.prices), graph, stages)


def _variables(parts: Parts, graph: Graph, sharding: Sharding, mine: Sequence[Stage], at: Mapping[str, int]) -> dict[str, Tensor]:
    """Return the existing parameters and buffers that this rank's stages read, by graph value."""
    used_values = {value for stage in mine for value in stage.variables}
    tensors = {**parts.buffers, **parts.parameters}
    variables: dict[str, Tensor] = {}
    for v in (*graph.parameters, *graph.buffers):
        if v.value not in used_values:
            continue
        if v.name not in tensors:
            stage = next(stage.index for stage in mine if v.value in stage.variables)
            raise ModelError(
                f"stage {stage} of the pipeline reads {v.name} here, and in training another one does, which is not supported yet; "
                "evaluate the serial model from engine.full_state_dict(), or use a layout without a pipeline"
            )
        expected, stored, zero_shard = sharding.shape(v.value, v.tensor.shape, at=at), tensors[v.name].shape, parts.pieces.get(v.name)
        if [n for dim, n in enumerate(stored) if zero_shard is None or dim != zero_shard.dim] != [
            n for dim, n in enumerate(expected) if zero_shard is None or dim != zero_shard.dim
        ]:
            raise ModelError(f"{v.name} is used differently than in training and would be sharded differently, which is not supported yet")
        variables[v.value] = tensors[v.name]
    return variables


def _entering(
    parts: Parts, graph: Graph, sharding: Sharding, mesh: Mesh, across: AbstractSet[str], always: Sequence[str]
) -> dict[str, Entering]:
    """Return how parameter gradients are adjusted so that they can be reduced over the axes of training and the always-reduced axes.

    Raises:
        ModelError: a parameter has a gradient that has none in training; raised on every rank.
    """
    with_gradient, with_training_gradient = learned(graph), {v.name for v in parts.graph.parameters if v.value in learned(parts.graph)}
    adjustments = {}
    for v in graph.parameters:
        if v.value not in with_gradient or v.value in across:
            continue
        if v.name not in with_training_gradient:
            raise ModelError(
                f"{v.name} learns from a batch of this form, and does not from the one that the model was divided with; divide it with a "
                "batch from which every parameter learns"
            )
        if v.name in parts.specs and (adjustment := entering_of(v.value, {*parts.specs[v.name].summed_over, *always}, sharding, mesh)):
            adjustments[v.value] = adjustment
    return adjustments


def _cuts(parts: Parts) -> tuple[tuple[str, Shards], ...]:
    """Return how parameters and buffers are sharded along every axis."""
    widest = max((*parts.shardings, parts.sharding), key=lambda sharding: sum(map(len, sharding.shards.values())))
    return tuple(widest.shards.items())


def _begins(sites: Sequence[str], training: Graph, graph: Graph) -> list[str]:
    """Return the first site of every stage in `graph`: the one of training, or the next later site that `graph` has."""
    order = list(training.sites)
    first_sites = []
    for site in sites:
        later_sites = (later_site for later_site in order[training.sites[site] :] if later_site in graph.sites)
        first_sites.append(next(later_sites, site))
    return first_sites
