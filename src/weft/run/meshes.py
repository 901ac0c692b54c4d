"""Stages that arrange their ranks differently (`inner=4x1/2x2`): the sharding of each, and what several of them share.

In: a plan, a graph cut into stages. Out: the sharding of the whole graph as each stage has it; parameters and buffers that stages of
different meshes read, which are cut over no tensor axis; and by how much a rank's gradient counts, of these and where ranks are split
otherwise for another microbatch.

Not modelled: what such stages share being cut.
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
    """Who knows the sharding that a plan means: a `Source`."""

    def sharding(self, plan: Plan, graph: Graph) -> Sharding: ...


def between_meshes(layout: Layout, stages: Sequence[Stage]) -> frozenset[str]:
    """Variables that stages of different meshes read."""
    meshes: dict[str, set[tuple[int, int]]] = {}
    if layout.inner:
        for stage in stages:
            layout_here = layout.of_stage(stage.index)
            for value in stage.variables:
                meshes.setdefault(value, set()).add((layout_here.data, layout_here.tensor))
    return frozenset(value for value, those in meshes.items() if len(those) > 1)


def stage_shardings(plan: Plan, source: Shards, graph: Graph, stages: Sequence[Stage]) -> tuple[Sharding, ...]:
    """The sharding of the graph under each pipeline rank's own mesh."""
    layout = plan.layout
    if not layout.inner:
        sharding = source.sharding(plan, graph)
        _check_shared(sharding, graph, layout.zero)
        return (sharding,) * layout.pipeline
    variables = (*graph.parameters, *graph.buffers)
    cuts = expand_all(plan.shards, (v.name for v in variables))
    inner = [layout.of_stage(s) for s in range(layout.pipeline)]
    if "tensor" not in cuts:
        widest = max(inner, key=lambda one: one.tensor)
        cuts = {"tensor": source.sharding(replace(plan, layout=widest), graph).shards.get("tensor", ())}
    shared = {v.name for v in variables if v.value in between_meshes(layout, stages)}
    cuts_here = (("tensor", tuple((name, dim) for name, dim in cuts["tensor"] if name not in shared)),)
    return tuple(source.sharding(replace(plan, layout=one, shards=cuts_here), graph) for one in inner)


def from_other_meshes(layout: Layout, stages: Sequence[Stage]) -> frozenset[str]:
    """What these stages receive from stages that arrange their ranks differently."""
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
    """Of each variable between meshes: the part of this rank's gradient that counts in the sum over all ranks of its stages.

    Along an axis over which gradients are summed each rank has a summand; along the others all have the same.
    """
    ranks = prod(mesh.size(axis) for axis in mesh.inside)
    summed = {value: prod(mesh.size(axis) for axis in sharding.gradients.get(value, ())) for value in between}
    return {value: number / ranks for value, number in summed.items()}


def always_summed(layout: Layout) -> tuple[str, ...]:
    """Mesh axes along which gradients are summed whether or not ranks have other summands there: those between which ranks may be split
    otherwise for another microbatch."""
    return (DATA, CONTEXT) if layout.split == LENGTHS else ()


def entering_of(value: str, exchanged: AbstractSet[str], sharding: Sharding, mesh: Mesh) -> Entering | None:
    """What is done to a parameter's gradient that is summed along the axes `exchanged`, where a graph leaves summands along others: these
    are summed where they are made, and along axes where all ranks have the same each counts as its part. None where nothing is."""
    partial = set(sharding.gradients.get(value, ()))
    share = 1.0 / prod(mesh.size(axis) for axis in exchanged - partial)
    more = tuple(axis for axis in sharding.sizes if axis in partial - exchanged)
    return Entering(more, share) if more or share != 1.0 else None


def entering_always(layout: Layout, graph: Graph, sharding: Sharding, mesh: Mesh) -> dict[str, Entering]:
    """What is done to the gradients of parameters that are summed along `always_summed` axes and those where ranks have summands."""
    if not (always := always_summed(layout)):
        return {}
    axes = {v.value: {*sharding.gradients.get(v.value, ()), *always} for v in graph.parameters}
    return {value: how for value, those in axes.items() if (how := entering_of(value, those, sharding, mesh))}


def _check_shared(sharding: Sharding, graph: Graph, zero: int) -> None:
    """Raise LayoutError where ranks would have to gather what only some of them read: weights that several branches share, under ZeRO."""
    if zero < 2:
        return
    owned = {name for region in sharding.regions for name in region.ranks}
    read = {value for op in graph.operators if op.name in owned for value in op.inputs}
    for v in graph.parameters:
        if v.value in read and not any(is_owned(form) for form in sharding.forms[v.value].values()):
            axis = sharding.regions[0].axis
            raise LayoutError(f"zero={zero} with {v.name}, which branches of several ranks of {axis} share, is not supported; use zero=1")
