"""Resize a sharding to another number of samples, or to unequal shares of replicas: only lengths of sample shards change.

Decisions do not depend on the number of samples: dimensions that follow the samples hold whole units of them (`num_units_by_dim`),
and every replica gets the same units of each. Not modeled: samples that another axis shards again, and users' autograd functions, which are
checked on equal shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.errors import Infeasible
from shardwise.model.dims.labels import num_units_by_dim
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.placement import Placement, is_shard, shard

AxisShares = Mapping[str, tuple[int, ...]]  # by axis; a missing axis, or an empty tuple, has equal ones


def resize_sample_shards(sharding: Sharding, graph: Graph, shares: AxisShares) -> Sharding:
    """Return `sharding`, of this graph or of the same model with another number of samples, with shards of `graph`'s samples.

    Raises:
        Infeasible: a replica without a sample; unequal shards of values that cannot have them.
    """
    axes = sharding.sample_axes
    counts = num_units_by_dim(graph, False)

    def piece(value: str, axis: str, form: Placement) -> Placement:
        shape = graph.tensors[value].shape if value in graph.tensors else ()
        if axis not in axes or not is_shard(form) or not shape:
            return form
        length, n = shape[form.dim], sharding.sizes[axis]
        count = counts.get((value, form.dim), length)
        if count < n:
            raise Infeasible(f"{value} {list(shape)} has {count} samples for {axis}={n}; use a batch of {n} samples or more, or fewer")
        unit = length // count if length % count == 0 else 1
        return shard(form.dim, length, n, unit, shares.get(axis, ()))

    forms = {value: {a: piece(value, a, form) for a, form in by.items()} for value, by in sharding.placements.items()}
    needs = {
        op.name: tuple(
            {a: form if form is None else piece(value, a, form) for a, form in row.items()}
            for value, row in zip(op.inputs, sharding.input_placements[op.name], strict=True)
        )
        for op in graph.operators
    }
    moves = tuple(
        replace(move, source=piece(move.value, move.axis, move.source), target=piece(move.value, move.axis, move.target))
        for move in sharding.redistributions
    )
    regions = tuple(
        replace(region, exit_shards={v: cut for v, form in region.exit_shards.items() if is_shard(cut := piece(v, region.axis, form))})
        for region in sharding.regions
    )
    changed = replace(sharding, placements=forms, input_placements=needs, redistributions=moves, regions=regions)
    _check_unequal_shards(changed, graph)
    return changed


def _check_unequal_shards(sharding: Sharding, graph: Graph) -> None:
    """Refuse unequal shards where samples are sharded more than once, and for inputs of users' autograd functions."""
    for op in graph.operators:
        for row in sharding.input_placements[op.name]:
            for axis, form in row.items():
                if not is_shard(form) or not form.lengths or not axis_of(axis).shards_samples:
                    continue
                other_axis = next((a for a, other in row.items() if a != axis and is_shard(other) and other.dim == form.dim), "")
                if other_axis or op.function is not None:
                    why = f"{other_axis} shards them again" if other_axis else f"{op.site} has its own backward, checked on equal shards"
                    raise Infeasible(
                        f"a microbatch of {graph.batch_size} samples would be sharded unequally over {axis}={sharding.sizes[axis]}, and "
                        f"{why}; use microbatches that divide, and equal shares"
                    )
