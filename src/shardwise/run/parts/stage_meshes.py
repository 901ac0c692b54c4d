"""Per-stage meshes (`inner=4x1/2x2`): the sharding of each pipeline stage, and the weights that stages of different meshes share.

In: a plan, a graph cut into stages. Out: the sharding of the whole graph for each stage; parameters and buffers read by stages of different
meshes, which stay replicated over tensor ranks; and the weight of a rank's gradient in the reduction, for these and for data x context
splits that differ between microbatches.

Not supported: tensor sharding of weights that such stages share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Protocol

from shardwise.errors import LayoutError
from shardwise.lower.lowering import LocalGradientReduction
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import Stage
from shardwise.plan.compatibility import SPLIT_BY_LENGTH
from shardwise.plan.ir.axis import CONTEXT, DATA
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.patterns import expand_shards
from shardwise.plan.ir.placement import has_single_owner
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan


class GraphSharder(Protocol):
    """Anything that shards a graph by a plan: a `ModelSource`."""

    def sharding(self, plan: Plan, graph: Graph) -> Sharding: ...


def variables_across_meshes(layout: Layout, stages: Sequence[Stage]) -> frozenset[str]:
    """Return the variables that stages of different meshes read."""
    meshes: dict[str, set[tuple[int, int]]] = {}
    if layout.inner:
        for stage in stages:
            layout_here = layout.of_stage(stage.index)
            for value in stage.variables:
                meshes.setdefault(value, set()).add((layout_here.data, layout_here.tensor))
    return frozenset(value for value, meshes_reading in meshes.items() if len(meshes_reading) > 1)


def stage_shardings(plan: Plan, source: GraphSharder, graph: Graph, stages: Sequence[Stage]) -> tuple[Sharding, ...]:
    """Return the sharding of the graph on each pipeline rank's own mesh."""
    layout = plan.layout
    if not layout.inner:
        sharding = source.sharding(plan, graph)
        _check_shared_weights(sharding, graph, layout.zero)
        return (sharding,) * layout.pipeline
    variables = (*graph.parameters, *graph.buffers)
    cuts = expand_shards(plan.shards, (v.name for v in variables))
    stage_layouts = [layout.of_stage(s) for s in range(layout.pipeline)]
    if "tensor" not in cuts:
        widest = max(stage_layouts, key=lambda stage_layout: stage_layout.tensor)
        cuts = {"tensor": source.sharding(replace(plan, layout=widest), graph).shards.get("tensor", ())}
    shared = {v.name for v in variables if v.value in variables_across_meshes(layout, stages)}
    cuts_here = (("tensor", tuple((name, dim) for name, dim in cuts["tensor"] if name not in shared)),)
    return tuple(source.sharding(replace(plan, layout=stage_layout, shards=cuts_here), graph) for stage_layout in stage_layouts)


def received_across_meshes(layout: Layout, stages: Sequence[Stage]) -> frozenset[str]:
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


def gradient_shares(across_meshes: frozenset[str], sharding: Sharding, mesh: Mesh) -> Mapping[str, float]:
    """Return the weight of this rank's gradient in the reduction over all ranks of the stages that share a variable.

    Gradients are partial along their reduction axes and replicated along the others.
    """
    ranks = prod(mesh.size(axis) for axis in mesh.stage_axes)
    summed = {value: prod(mesh.size(axis) for axis in sharding.gradient_axes.get(value, ())) for value in across_meshes}
    return {value: number / ranks for value, number in summed.items()}


def always_summed_axes(layout: Layout) -> tuple[str, ...]:
    """Return the mesh axes along which gradients are always reduced, since the data x context split may vary by microbatch."""
    return (DATA, CONTEXT) if layout.split == SPLIT_BY_LENGTH else ()


def gradient_adjustments(
    reduced_axes: Mapping[str, Collection[str]], layout: Layout, sharding: Sharding, mesh: Mesh
) -> dict[str, LocalGradientReduction]:
    """Return how to adjust parameter gradients, by value, that are later reduced along `reduced_axes` and the always-reduced ones: partial
    axes outside of these are reduced at once, and along replicated axes among them gradients are scaled by 1/n."""
    adjustments = {}
    for value, axes in reduced_axes.items():
        summed, partial = {*axes, *always_summed_axes(layout)}, set(sharding.gradient_axes.get(value, ()))
        share = 1.0 / prod(mesh.size(axis) for axis in summed - partial)
        extra_axes = tuple(axis for axis in sharding.sizes if axis in partial - summed)
        if extra_axes or share != 1.0:
            adjustments[value] = LocalGradientReduction(extra_axes, share)
    return adjustments


def _check_shared_weights(sharding: Sharding, graph: Graph, zero: int) -> None:
    """Raise LayoutError for weights that several branches share under ZeRO-2/3: only some ranks would take part in their gathers."""
    if zero < 2:
        return
    owned_operators = {name for region in sharding.regions for name in region.rank_of}
    read = {value for op in graph.operators if op.name in owned_operators for value in op.inputs}
    for v in graph.parameters:
        if v.value in read and not any(has_single_owner(form) for form in sharding.placements[v.value].values()):
            axis = sharding.regions[0].axis
            raise LayoutError(f"zero={zero} with {v.name}, which branches of several ranks of {axis} share, is not supported; use zero=1")
