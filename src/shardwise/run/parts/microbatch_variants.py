"""Lower a rank's stages for another microbatch size: the same operators under the same sharding, at other shapes.

In: how the stages were lowered, and the graph with another number of samples. Out: a `MicrobatchVariant` that shares parameters, groups
and random state, so that one step may have microbatches of several sizes.

Not supported: a model that computes something else with another number of samples; it is refused by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from torch import Tensor

from shardwise.errors import Infeasible, ModelError, ShardwiseError
from shardwise.lower.local import LocalStage, Lowering, lower
from shardwise.model.batch.additive import SampleCoupling, describe_couplings, describe_microbatch_couplings
from shardwise.model.batch.summable_loss import SummableLossGraph
from shardwise.model.dims.expert_rows import expert_rows
from shardwise.model.graph import Graph, Operator
from shardwise.model.sharding.sample_shards import AxisShares, resize_sample_shards
from shardwise.model.sharding.sharding import Sharding
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.placement import is_shard
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.parts.runnable_sharding import check_runnable


@dataclass(frozen=True)
class MicrobatchVariant:
    """One rank's stages, by index, for microbatches of `graph.batch_size` samples. `constants`: override those of the base size.
    `shardings`: of the graph on every pipeline rank; `sharding`: on this one."""

    loss_graph: SummableLossGraph
    lowered: Mapping[int, LocalStage]
    constants: Mapping[str, Tensor]
    shardings: tuple[Sharding, ...]
    sharding: Sharding

    @property
    def graph(self) -> Graph:
        """Graph of one microbatch."""
        return self.loss_graph.graph


def sample_shares(layout: Layout) -> AxisShares:
    """Return the sample shares of replicas, by axis."""
    return {DATA: layout.replica_shares}


def lower_variant(
    base: MicrobatchVariant, lowering: Lowering, loss_graph: SummableLossGraph, plan: Plan, constants: Mapping[str, Tensor]
) -> MicrobatchVariant:
    """Lower the stages of `base` (lowered by `lowering`) on the graph of another microbatch size.

    Raises:
        Infeasible: the model computes something else at this size, or a tensor does not divide.
    """
    shardings = resize_shardings(base.shardings, lowering.graph, loss_graph.graph, plan.layout)
    sharding = next(resized for old, resized in zip(base.shardings, shardings, strict=True) if old is base.sharding)
    variant_lowering = replace(lowering, graph=loss_graph.graph, sharding=sharding)
    stages = loss_graph.split_stages(plan.stages)
    lowered = {number: lower(stages[number], variant_lowering) for number in base.lowered}
    return MicrobatchVariant(loss_graph, lowered, constants, shardings, sharding)


def warn_of_coupled_microbatches(layout: Layout, couplings: Sequence[SampleCoupling], rank: int) -> None:
    """Warn on rank 0 that and where microbatches train something else than the whole batch does."""
    if rank == 0 and layout.microbatches > 1 and (words := describe_microbatch_couplings(couplings)):
        warnings.warn(words, RuntimeWarning, stacklevel=3)


def explain_coupled_microbatch(error: Exception, layout: Layout, couplings: Sequence[SampleCoupling]) -> Exception:
    """Return an error that names the operators that read other samples' values, for what a microbatch of a coupled model raised: what they
    index is elsewhere. Others are returned as they are."""
    if layout.microbatches == 1 or not couplings or isinstance(error, ShardwiseError):
        return error
    why, where = " ".join(str(error).split())[:200], describe_couplings(couplings)
    return ModelError(f"a microbatch cannot compute what the whole batch does ({why}): {where}; use microbatches=1")


def resize_shardings(shardings: Sequence[Sharding], base: Graph, graph: Graph, layout: Layout) -> tuple[Sharding, ...]:
    """Return the shardings of `base` on `graph`, which has another number of samples.

    Raises:
        Infeasible: it has other operators, or a tensor does not divide.
    """
    check_same_operators(base, graph)
    resized = {id(sharding): resize_sample_shards(sharding, graph, sample_shares(layout)) for sharding in shardings}
    for sharding in resized.values():
        check_divisible(sharding, graph)
        check_runnable(graph, sharding, layout)
    return tuple(resized[id(sharding)] for sharding in shardings)


def check_same_operators(base: Graph, graph: Graph) -> None:
    """Raise Infeasible if `graph` has other operators than `base`."""
    for base_op, op in zip_longest(base.operators, graph.operators):
        if base_op is None or op is None or _operator_key(base, base_op) != _operator_key(graph, op):
            raise Infeasible(_describe_difference(graph, base, (base_op or op).site))
    if [(v.value, v.name, v.batched) for v in base.inputs] != [(v.value, v.name, v.batched) for v in graph.inputs]:
        raise Infeasible(_describe_difference(graph, base, "the inputs that it reads"))


def check_divisible(sharding: Sharding, graph: Graph) -> None:
    """Raise Infeasible if a tensor's shape does not divide by its sharding."""
    stored = list(sharding.placements.items())
    operands = [
        pair for op in graph.operators for pair in zip(op.inputs, sharding.input_placements[op.name], strict=True)
    ]  # also as operands
    for value, placements in (*stored, *operands):
        shape = graph.tensors[value].shape if value in graph.tensors else ()
        for axis, placement in placements.items():
            if not is_shard(placement) or not shape or (value, placement.dim) in expert_rows(graph):
                continue
            if sum(placement.lengths) != shape[placement.dim] if placement.lengths else shape[placement.dim] % sharding.sizes[axis]:
                raise Infeasible(
                    f"with microbatches of {graph.batch_size} samples {value} has shape {list(shape)}, whose dimension {placement.dim} "
                    f"does not divide over {axis}={sharding.sizes[axis]}; use batches that divide into equal microbatches"
                )


def _operator_key(graph: Graph, op: Operator) -> tuple[object, ...]:
    return op.site, op.name, op.target, op.inputs, op.outputs, tuple(len(graph.tensors[v].shape) for v in op.outputs)


def _describe_difference(graph: Graph, ours: Graph, where: str) -> str:
    return (
        f"with microbatches of {graph.batch_size} samples the model computes something else than with {ours.batch_size}, first at {where}; "
        "use batches that divide into equal microbatches"
    )
