"""Stages for microbatches of another size: the same operators under the same sharding, lowered at other shapes.

In: how a rank's stages were lowered, and the graph that the model makes with another number of samples. Out: `Sized`. Parameters, groups
and what is drawn are shared, so that a step may have microbatches of several sizes.

Not modelled: a model that computes something else with another number of samples; it is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch
from torch import Tensor

from weft.errors import Infeasible
from weft.lower.local import LocalStage, Lowering, lower
from weft.model.batch.normalise import Normalised
from weft.model.graph import Graph, Operator
from weft.model.sharding.sample_pieces import Shares, with_samples_of
from weft.model.sharding.sharding import Sharding
from weft.plan.axis import DATA
from weft.plan.layout import Layout
from weft.plan.placement import is_shard
from weft.plan.plan import Plan


@dataclass(frozen=True)
class Sized:
    """One rank's stages, by number, for microbatches of `graph.batch_size` samples. `constants`: in place of those of another size.
    `shardings`: of the graph as each pipeline rank arranges it, and `sharding` as this one does."""

    normal: Normalised
    lowered: Mapping[int, LocalStage]
    constants: Mapping[str, Tensor]
    shardings: tuple[Sharding, ...]
    sharding: Sharding

    @property
    def graph(self) -> Graph:
        """Of one microbatch."""
        return self.normal.graph


def shares_of_samples(layout: Layout) -> Shares:
    """The shares of replicas, by axis."""
    return {DATA: layout.weights}


def sized(like: Sized, lowering: Lowering, normal: Normalised, plan: Plan, constants: Mapping[str, Tensor]) -> Sized:
    """The stages of `like`, which `lowering` made, on another graph of the same model.

    Raises:
        Infeasible: the model computes something else there, or a tensor does not divide as it must.
    """
    check_operators(lowering, normal.graph)
    shares = shares_of_samples(plan.layout)
    again = {id(one): with_samples_of(one, normal.graph, shares) for one in like.shardings}
    sharding = again[id(like.sharding)]
    check_divides(sharding, normal.graph)
    other = replace(lowering, graph=normal.graph, sharding=sharding)
    stages = normal.stages(plan.stages)
    lowered = {number: lower(stages[number], other) for number in like.lowered}
    return Sized(normal, lowered, constants, tuple(again[id(one)] for one in like.shardings), sharding)


def check_operators(lowering: Lowering, graph: Graph) -> None:
    """Raise Infeasible where `graph` has other operators than the one that was lowered."""
    ours = lowering.graph
    for mine, other in zip_longest(ours.operators, graph.operators):
        if mine is None or other is None or _essence(ours, mine) != _essence(graph, other):
            raise Infeasible(_describe_difference(graph, ours, (mine or other).site))
    if [(v.value, v.name, v.batched) for v in ours.inputs] != [(v.value, v.name, v.batched) for v in graph.inputs]:
        raise Infeasible(_describe_difference(graph, ours, "what it reads of the batch"))


def check_divides(sharding: Sharding, graph: Graph) -> None:
    """Raise Infeasible where a graph has tensors that its sharding does not divide."""
    held = list(sharding.forms.items())
    moved = [pair for op in graph.operators for pair in zip(op.inputs, sharding.needs[op.name], strict=True)]  # and read there
    for value, forms in (*held, *moved):
        shape = graph.tensors[value].shape if value in graph.tensors else ()
        for axis, form in forms.items():
            if not is_shard(form) or not shape or (value, form.dim) in graph.ragged:
                continue
            if sum(form.lengths) != shape[form.dim] if form.lengths else shape[form.dim] % sharding.sizes[axis]:
                raise Infeasible(
                    f"with microbatches of {graph.batch_size} samples {value} has shape {list(shape)}, whose dimension {form.dim} does not "
                    f"divide over {axis}={sharding.sizes[axis]}; use batches that divide into equal microbatches"
                )


def _essence(graph: Graph, op: Operator) -> tuple[object, ...]:
    return op.site, op.name, op.target, op.inputs, op.outputs, tuple(len(graph.tensors[v].shape) for v in op.outputs)


def _describe_difference(graph: Graph, ours: Graph, where: str) -> str:
    return (
        f"with microbatches of {graph.batch_size} samples the model computes something else than with {ours.batch_size}, first at {where}; "
        "use batches that divide into equal microbatches"
    )


def constants_of(constants: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Small tensors that the model's code made, by graph value, as the run holds them."""
    held = {value: tensor.to(device) for value, tensor in constants.items()}
    if dtype is torch.float64:
        held = {value: t.double() if t.dtype is torch.float32 else t for value, t in held.items()}
    return held
