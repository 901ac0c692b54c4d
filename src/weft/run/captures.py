"""A model captured once more: in evaluation beside training, of batches of another form. Parameters and buffers are those that are there.

In: this rank's parts, the source of the model, what is asked for. Out: parts with another graph, lowered over the same divided tensors. A
model may compute something else in evaluation than in training (no dropout, running statistics, another branch or output), of other tensors
or of tensors with other shapes, so each is a graph of its own, made when it is first asked for, by every rank for itself. Of a graph with
the same operators the sharding stays the same; of another one it follows from where parameters are cut.

Not modelled: a capture that reads a parameter on another pipeline stage than training does; it is refused by name.
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
    """What is captured: the model in `modes` on a batch of this form. `trains`: whether backward runs, into gradients that ranks sum as
    the plan says. `outputs`: up to the model's outputs, without a loss. `size`: samples of a microbatch, by default the plan's, and
    `samples` of the batch. `replicated`: every replica computes all samples, instead of its part. `together`: outputs are of all samples
    on every rank. `pages`: of a decoder, where its attention finds the keys of earlier tokens."""

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
    """`parts` of the model as it is `asked` for, whose random numbers depend on what those of `parts` do.

    Raises:
        ModelError: the model cannot be followed so, a stage reads a parameter that another one has, or one learns that did not.
        Infeasible, LayoutError, ProgramError: the plan does not suit the graph.
    """
    modes, batch, loss, outputs = asked.modes, asked.batch, asked.loss, asked.outputs
    if asked.pages is not None:  # a step may have fewer tokens than there are ranks
        plan = replace(plan, layout=replace(plan.layout, sequence_parallel="off"))
    first, samples = asked.size or plan.microbatch_sizes[0], asked.samples or asked.size or plan.batch_size
    part = outputs_of(source, plan, batch, first, modes) if outputs else source.part(plan, batch, loss, first, samples, modes)
    graph, normal = part.normal.graph, part.normal
    check_samples(graph, plan.layout)
    sites = _begins(plan.stages, parts.graph, graph)
    stages = normal.stages(sites, asked.trains)
    program = program_of(plan, stages, world)
    mesh = plan.layout.mesh_of(world.rank)
    at = mesh.coordinates(world.rank)
    shardings = _shardings(parts, plan, source, graph, stages, mesh, asked.replicated)
    sharding = shardings[at["pipeline"]]
    mine = [stages[s] for s in program.stages_of[at["pipeline"]]]
    groups = groups_of(graph, sharding, mesh, world)
    rows = rows_of_outputs(source, batch, graph, sharding, modes) if outputs and not asked.together else {}
    samples_at = () if outputs else folds(plan, source, part.captured, batch, loss, modes)  # outputs are of whole batches
    arriving = frozenset(total.variable for total in normal.totals)
    apart = from_other_meshes(plan.layout, mine)
    across = between_meshes(plan.layout, stages) & {v.value for v in graph.parameters} if asked.trains else frozenset()
    shares, entering = shares_of(across, sharding, mesh), {}
    if asked.trains:
        entering = _entering(parts, graph, sharding, mesh, across, always_summed(plan.layout))
    statistics, precision = plan.layout.local_statistics, PRECISIONS[plan.layout.precision]
    lowering = Lowering(
        graph, sharding, groups, world.device, parts.draw, rows, shares, apart, samples_at, arriving, parts.arrival, statistics, precision,
        entering, asked.pages,
    )
    lowered = {stage.index: lower(stage, lowering) for stage in mine}
    dtype, like = DTYPES[plan.layout.precision], Sized(normal, lowered, {}, shardings, sharding)
    cut_here = replace(plan, stages=tuple(sites))

    def other(size: int, count: int) -> Sized:
        if (size, count) == (first, samples):
            return like
        again = outputs_of(source, plan, batch, size, modes) if outputs else source.part(plan, batch, loss, size, count, modes)
        where_drawn = () if outputs else samples_at or folds(plan, source, again.captured, batch, loss, modes)
        placed = replace(lowering, folds=where_drawn)
        return sized(like, placed, again.normal, cut_here, constants_of(again.constants, world.device, dtype))

    variables = _variables(parts, graph, sharding, mine, at)
    used = {value for stage in mine for value in stage.variables}
    variables |= {v: t for v, t in constants_of(part.constants, world.device, dtype).items() if v in used}
    return replace(
        parts, graph=graph, sharding=sharding, stages=stages, program=program, lowered=lowered, variables=variables,
        structure=part.structure, sized=lru_cache(MOST_SIZES)(other), folds=samples_at, shardings=shardings, lowering=lowering,
        coupled=part.coupled, counted=normal.counted_from,
    )  # fmt: skip


def _cut_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    return {axis: n for axis, n in sizes.items() if n > 1 and axis_of(axis).cuts}


def _shardings(
    parts: Parts, plan: Plan, source: Source, graph: Graph, stages: Sequence[Stage], mesh: Mesh, replicated: bool
) -> tuple[Sharding, ...]:
    """The sharding of a graph by pipeline rank: that of `parts` where its operators are the same and its tensors divide as it says."""
    if replicated:
        plan = replace(plan, layout=replace(plan.layout, data=1))
    elif parts.lowering is not None and _cut_sizes(parts.sharding.sizes) == _cut_sizes(dict(mesh.axes)):
        try:
            check_operators(parts.lowering, graph)
            again = {id(one): with_samples_of(one, graph, shares_of_samples(plan.layout)) for one in parts.shardings}
            for one in again.values():
                check_divides(one, graph)
            return tuple(again[id(one)] for one in parts.shardings)
        except Infeasible:
            pass
    # A sharding that `source` keeps is that of training.
    return stage_shardings(replace(plan, shards=_cuts(parts)), Source(source.model, source.deferred, source.prices), graph, stages)


def _variables(parts: Parts, graph: Graph, sharding: Sharding, mine: Sequence[Stage], at: Mapping[str, int]) -> dict[str, Tensor]:
    """The parameters and buffers that this rank's stages read, which it has already."""
    used = {value for stage in mine for value in stage.variables}
    held = {**parts.buffers, **parts.parameters}
    variables: dict[str, Tensor] = {}
    for v in (*graph.parameters, *graph.buffers):
        if v.value not in used:
            continue
        if v.name not in held:
            stage = next(stage.index for stage in mine if v.value in stage.variables)
            raise ModelError(
                f"stage {stage} of the pipeline reads {v.name} here, and in training another one does, which is not supported yet; "
                "evaluate the serial model from engine.full_state_dict(), or use a layout without a pipeline"
            )
        want, have, piece = sharding.shape(v.value, v.tensor.shape, at=at), held[v.name].shape, parts.pieces.get(v.name)
        if [n for dim, n in enumerate(have) if piece is None or dim != piece.dim] != [
            n for dim, n in enumerate(want) if piece is None or dim != piece.dim
        ]:
            raise ModelError(f"{v.name} is written otherwise than in training, and lies in other pieces then, which is not supported yet")
        variables[v.value] = held[v.name]
    return variables


def _entering(
    parts: Parts, graph: Graph, sharding: Sharding, mesh: Mesh, across: AbstractSet[str], always: Sequence[str]
) -> dict[str, Entering]:
    """What is done to gradients of parameters, so that ranks can sum them over the axes over which they sum those of training, and those
    over which they `always` do.

    Raises:
        ModelError: a parameter learns that does not in training, as every rank finds.
    """
    learns, trained = learned(graph), {v.name for v in parts.graph.parameters if v.value in learned(parts.graph)}
    entering = {}
    for v in graph.parameters:
        if v.value not in learns or v.value in across:
            continue
        if v.name not in trained:
            raise ModelError(
                f"{v.name} learns from a batch of this form, and does not from the one that the model was divided with; divide it with a "
                "batch from which every parameter learns"
            )
        if v.name in parts.specs and (how := entering_of(v.value, {*parts.specs[v.name].summed_over, *always}, sharding, mesh)):
            entering[v.value] = how
    return entering


def _cuts(parts: Parts) -> tuple[tuple[str, Shards], ...]:
    """Where parameters and buffers are cut, along every axis."""
    widest = max((*parts.shardings, parts.sharding), key=lambda sharding: sum(map(len, sharding.shards.values())))
    return tuple(widest.shards.items())


def _begins(sites: Sequence[str], training: Graph, graph: Graph) -> list[str]:
    """Where stages begin in `graph`: at the sites at which they do in training, or at the next of them that `graph` has."""
    order = list(training.sites)
    begins = []
    for site in sites:
        later = (other for other in order[training.sites[site] :] if other in graph.sites)
        begins.append(next(later, site))
    return begins
