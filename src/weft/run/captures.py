"""A model captured once more, in other modes: evaluation beside training. Parameters and buffers are those that are there already.

In: this rank's parts, the source of the model, the modes. Out: parts with another graph, lowered over the same divided tensors. A model
may compute something else in evaluation than in training (no dropout, running statistics, another branch or output), so its evaluation is
a graph of its own, made when it is first asked for.

Not modelled: evaluation that reads a parameter on another pipeline stage than training does; it is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from weft.capture.capture import Loss
from weft.capture.modes import Modes
from weft.errors import ModelError
from weft.lower.local import Lowering, lower
from weft.model.graph import Graph
from weft.model.samples import check_samples
from weft.model.sharding import Shards
from weft.plan.plan import Plan
from weft.run.build import Source, folds, outputs_of, rows_of_outputs
from weft.run.meshes import from_other_meshes, stage_shardings
from weft.run.parts import Parts, program_of
from weft.run.sizes import Sized, constants_of, sized
from weft.run.state.precision import DTYPES
from weft.world.world import World


def captured_in(
    modes: Modes, parts: Parts, plan: Plan, source: Source, batch: Any, loss: Loss | None, world: World, outputs: bool = False
) -> Parts:
    """`parts` of the model in other `modes`, whose random numbers depend on what those of `parts` do. Every rank asks at the same time.

    Raises:
        ModelError: the model cannot be followed in these modes, or a stage reads a parameter that another one has.
        Infeasible, LayoutError, ProgramError: the plan does not suit the graph.
    """
    first = plan.microbatch_sizes[0]
    part = outputs_of(source, plan, batch, first, modes) if outputs else source.part(plan, batch, loss, first, plan.batch_size, modes)
    graph, normal = part.normal.graph, part.normal
    check_samples(graph, plan.layout)
    sites = _begins(plan.stages, parts.graph, graph)
    stages = normal.stages(sites, trains=False)
    program = program_of(plan, stages, world)
    at = plan.layout.mesh_of(world.rank).coordinates(world.rank)
    # A sharding that `source` keeps is that of training.
    shardings = stage_shardings(replace(plan, shards=_cuts(parts)), Source(source.model, source.deferred), graph, stages)
    sharding = shardings[at["pipeline"]]
    mine = [stages[s] for s in program.stages_of[at["pipeline"]]]
    mesh = plan.layout.mesh_of(world.rank)
    groups = {axis: world.group(mesh.group(world.rank, axis)) for axis in sharding.sizes}
    rows = rows_of_outputs(source, batch, graph, plan.layout.data, modes) if outputs else {}
    where_samples = folds(plan, source, part.captured, batch, loss, modes)
    late = frozenset(total.variable for total in normal.totals)
    apart = from_other_meshes(plan.layout, mine)
    own = plan.layout.own_statistics
    lowering = Lowering(graph, sharding, groups, world.device, parts.draw, rows, {}, apart, where_samples, late, parts.arrival, own)
    lowered = {stage.index: lower(stage, lowering) for stage in mine}
    dtype, known = DTYPES[plan.layout.precision], Sized(normal, lowered, {}, shardings, sharding)

    def other(size: int, samples: int) -> Sized:
        if (size, samples) == (first, plan.batch_size) or outputs:
            return known
        again = source.part(plan, batch, loss, size, samples, modes)
        return sized(known, lowering, again.normal, replace(plan, stages=tuple(sites)), constants_of(again.constants, world.device, dtype))

    used = {value for stage in mine for value in stage.variables}
    variables = {v: t for v, t in constants_of(part.constants, world.device, dtype).items() if v in used}
    held = {**parts.buffers, **parts.parameters}
    for v in (*graph.parameters, *graph.buffers):
        if v.value not in used:
            continue
        if v.name not in held:
            stage = next(stage.index for stage in mine if v.value in stage.variables)
            raise ModelError(
                f"stage {stage} of the pipeline reads {v.name} in evaluation, and in training another one does, which is not built yet; "
                "evaluate the serial model from engine.full_state_dict(), or use a layout without a pipeline"
            )
        if tuple(held[v.name].shape) != sharding.shape(v.value, v.tensor.shape, at=at):
            raise ModelError(f"{v.name} is written otherwise than in training, and lies in other pieces then, which is not built yet")
        variables[v.value] = held[v.name]
    return replace(
        parts, graph=graph, sharding=sharding, stages=stages, program=program, lowered=lowered, variables=variables,
        structure=part.structure, sized=cache(other), shardings=shardings, lowering=lowering,
    )  # fmt: skip


def _cuts(parts: Parts) -> tuple[tuple[str, Shards], ...]:
    """Where parameters and buffers are cut, along every axis."""
    widest = max((*parts.shardings, parts.sharding), key=lambda sharding: sum(map(len, sharding.shards.values())))
    return tuple(widest.shards.items())


def _begins(sites: Sequence[str], training: Graph, graph: Graph) -> list[str]:
    """Where stages begin in `graph`: at the sites at which they do in training, or at the next of them that `graph` has."""
    order = list(training.sites)
    found = []
    for site in sites:
        later = (other for other in order[training.sites[site] :] if other in graph.sites)
        found.append(next(later, site))
    return found
