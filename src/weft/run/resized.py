"""Lower a rank's stages for another microbatch size: the same operators under the same sharding, at other shapes.

In: how the stages were lowered, and the graph with another number of samples. Out: a `MicrobatchVariant` that shares parameters, groups
and random state, so that one step may have microbatches of several sizes.

Not supported: a model that computes something else with another number of samples; it is refused by name.
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
    """One rank's stages, by index, for microbatches of `graph.batch_size` samples. `constants`: override those of the base size.
    `shardings`: of the graph on every pipeline rank; `sharding`: on this one."""

    normal: Normalised
    lowered: Mapping[int, LocalStage]
    constants: Mapping[str, Tensor]
    shardings: tuple[Sharding, ...]
    sharding: Sharding

    @property
    def graph(self) -> Graph:
        """Graph of one microbatch."""
        return self.normal.graph


def shares_of_samples(layout: Layout) -> Shares:
    """Return the sample shares of replicas, by axis."""
    return {DATA: layout.weights}


def sized(like: Sized, lowering: Lowering, normal: Normalised, plan: Plan, constants: Mapping[str, Tensor]) -> Sized:
    """Lower the stages of `base` (lowered by `lowering`) on the graph of another microbatch size.

    Raises:
        Infeasible: the model computes something else at this size, or a tensor does not divide.
    """
    check_operators(lowering, normal.graph)
    shares = shares_of_samples(plan.layout)
    resized = {id(base_sharding): with_samples_of(base_sharding, normal.graph, shares) for base_sharding in like.shardings}
    sharding = resized[id(like.sharding)]
    check_divides(sharding, normal.graph)
    variant_lowering = replace(lowering, graph=normal.graph, sharding=sharding)
    stages = normal.stages(plan.stages)
    lowered = {number: lower(stages[number], variant_lowering) for number in like.lowered}
    return Sized(normal, lowered, constants, tuple(resized[id(base_sharding)] for base_sharding in like.shardings), sharding)


def check_operators(lowering: Lowering, graph: Graph) -> None:
    """Raise Infeasible if `graph` has other operators than the lowered one."""
    base = lowering.graph
    for base_op, op in zip_longest(base.operators, graph.operators):
        if base_op is None or op is None or _essence(base, base_op) != _essence(graph, op):
            raise Infeasible(_describe_difference(graph, base, (base_op or op).site))
    if [(v.value, v.name, v.batched) for v in base.inputs] != [(v.value, v.name, v.batched) for v in graph.inputs]:
        raise Infeasible(_describe_difference(graph, base, "the inputs that it reads"))


def check_divides(sharding: Sharding, graph: Graph) -> None:
    """Raise Infeasible if a tensor's shape does not divide by its sharding."""
    stored = list(sharding.forms.items())
    operands = [pair for op in graph.operators for pair in zip(op.inputs, sharding.needs[op.name], strict=True)]  # also as operands
    for value, placements in (*stored, *operands):
        shape = graph.tensors[value].shape if value in graph.tensors else ()
        for axis, placement in placements.items():
            if not is_shard(placement) or not shape or (value, placement.dim) in graph.ragged:
                continue
            if sum(placement.lengths) != shape[placement.dim] if placement.lengths else shape[placement.dim] % sharding.sizes[axis]:
                raise Infeasible(
                    f"with microbatches of {graph.batch_size} samples {value} has shape {list(shape)}, whose dimension {placement.dim} "
                    f"does not divide over {axis}={sharding.sizes[axis]}; use batches that divide into equal microbatches"
                )


def _essence(graph: Graph, op: Operator) -> tuple[object, ...]:
    return op.site, op.name, op.target, op.inputs, op.outputs, tuple(len(graph.tensors[v].shape) for v in op.outputs)


def _describe_difference(graph: Graph, ours: Graph, where: str) -> str:
    return (
        f"with microbatches of {graph.batch_size} samples the model computes something else than with {ours.batch_size}, first at {where}; "
        "use batches that divide into equal microbatches"
    )


def constants_of(constants: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Move constants of the captured graph to the device, by graph value; float32 becomes float64 in double precision."""
    on_device = {value: tensor.to(device) for value, tensor in constants.items()}
    if dtype is torch.float64:
        on_device = {value: t.double() if t.dtype is torch.float32 else t for value, t in on_device.items()}
    return on_device
