"""Per-stage meshes (`inner=4x1/2x2`): the sharding of each pipeline stage, and the weights that stages of different meshes share.

In: a plan, a graph cut into stages. Out: the sharding of the whole graph for each stage; parameters and buffers read by stages of different
meshes, which stay replicated over tensor ranks; and the weight of a rank's gradient in the reduction, for these and for data x context
splits that differ between microbatches.

Not supported: tensor sharding of weights that such stages share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import prod
from typing import Protocol

from weft.errors import LayoutError
from weft.lower.lowering import Entering
from weft.model.graph import Graph
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Stage
from weft.plan.axis import CONTEXT, DATA
from weft.plan.beside import LENGTHS
from weft.plan.layout import Layout
from weft.plan.mesh import Mesh
from weft.plan.patterns import expand_all
from weft.plan.placement import is_owned
from weft.plan.plan import Plan


class Shards(Protocol):
    """Anything that shards a graph by a plan: a `ModelSource`."""

    def sharding(self, plan: Plan, graph: Graph) -> Sharding: ...


def between_meshes(layout: Layout, stages: Sequence[Stage]) -> frozenset[str]:
    """Return the variables that stages of different meshes read."""
    meshes: dict[str, set[tuple[int, int]]] = {}
    if layout.inner:
        for stage in stages:
            layout_here = layout.of_stage(stage.index)
            for value in stage.variables:
                meshes.setdefault(value, set()).add((layout_here.data, layout_here.tensor))
    return frozenset(value for value, meshes_reading in meshes.items() if len(meshes_reading) > 1)


def stage_shardings(plan: Plan, source: Shards, graph: Graph, stages: Sequence[Stage]) -> tuple[Sharding, ...]:
    """Return the sharding of the graph on each pipeline rank's own mesh."""
    layout = plan.layout
    if not layout.inner:
        sharding = source.sharding(plan, graph)
        _check_shared(sharding, graph, layout.zero)
        return (sharding,) * layout.pipeline
    variables = (*graph.parameters, *graph.buffers)
    cuts = expand_all(plan.shards, (v.name for v in variables))
    stage_layouts = [layout.of_stage(s) for s in range(layout.pipeline)]
    if "tensor" not in cuts:
        widest = max(stage_layouts, key=lambda stage_layout: stage_layout.tensor)
        cuts = {"tensor": source.sharding(replace(plan, layout=widest), graph).shards.get("tensor", ())}
    shared = {v.name for v in variables if v.value in between_meshes(layout, stages)}
    cuts_here = (("tensor", tuple((name, dim) for name, dim in cuts["tensor"] if name not in shared)),)
    return tuple(source.sharding(replace(plan, layout=stage_layout, shards=cuts_here), graph) for stage_layout in stage_layouts)


def from_other_meshes(layout: Layout, stages: Sequence[Stage]) -> frozenset[str]:
    """Return the values that these stages receive from stages with another mesh."""
    return (
        frozenset(
            value
            for stage in stages
            for source, values in stage.receives
            if layout.of_stage(source) != layout.of_stage(stage.index)
            for value in values
        )
        if layout.inner
        else frozenset()
    )


def shares_of(between: frozenset[str], sharding: Sharding, mesh: Mesh) -> Mapping[str, float]:
    """Return the weight of this rank's gradient in the reduction over all ranks of the stages that share a variable.

    Gradients are partial along their reduction axes and replicated along the others.
    """
    ranks = prod(mesh.size(axis) for axis in mesh.inside)
    summed = {value: prod(mesh.size(axis) for axis in sharding.gradients.get(value, ())) for value in between}
    return {value: number / ranks for value, number in summed.items()}


def always_summed(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes along which gradients are always reduced, since the data x context split may vary by microbatch."""
    return (DATA, CONTEXT) if layout.split == LENGTHS else ()


def entering_of(value: str, exchanged: AbstractSet[str], sharding: Sharding, mesh: Mesh) -> Entering | None:
    """Return how to adjust a parameter's gradient that is later reduced along `summed_axes`: partial axes outside of these are reduced at
    once, and along replicated axes among them it is scaled by 1/n. None if nothing is to be done."""
    partial = set(sharding.gradients.get(value, ()))
    share = 1.0 / prod(mesh.size(axis) for axis in exchanged - partial)
    extra_axes = tuple(axis for axis in sharding.sizes if axis in partial - exchanged)
    return Entering(extra_axes, share) if extra_axes or share != 1.0 else None


def entering_always(layout: Layout, graph: Graph, sharding: Sharding, mesh: Mesh) -> dict[str, Entering]:
    """Return the adjustments of parameter gradients that are reduced along the always-reduced axes and their partial axes."""
    if not (always := always_summed(layout)):
        return {}
    axes = {v.value: {*sharding.gradients.get(v.value, ()), *always} for v in graph.parameters}
    return {value: adjustment for value, reduced in axes.items() if (adjustment := entering_of(value, reduced, sharding, mesh))}


def _check_shared(sharding: Sharding, graph: Graph, zero: int) -> None:
    """Raise LayoutError for weights that several branches share under ZeRO-2/3: only some ranks would take part in their gathers."""
    if zero < 2:
        return
    owned_operators = {name for region in sharding.regions for name in region.ranks}
    read = {value for op in graph.operators if op.name in owned_operators for value in op.inputs}
    for v in graph.parameters:
        if v.value in read and not any(is_owned(form) for form in sharding.forms[v.value].values()):
            axis = sharding.regions[0].axis
            raise LayoutError(f"zero={zero} with {v.name}, which branches of several ranks of {axis} share, is not supported; use zero=1")
