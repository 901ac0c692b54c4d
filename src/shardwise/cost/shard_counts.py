"""Numbers of shards into which mesh axes divide values and the work of operators. A sharding of None means that nothing is sharded."""

from __future__ import annotations

from math import inf, prod

from shardwise.model.graph import Operator
from shardwise.model.sharding.sharding import Redistribution, Sharding
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.placement import P, R, is_disjoint_shard, is_shard, is_sharded


def is_operator_sharded(sharding: Sharding | None, op: str, axis: str) -> bool:  # whether operator `op` is sharded over `axis`
    return sharding is not None and bool(sharding.labels[op].get(axis))


def tensor_axes(sharding: Sharding | None) -> tuple[str, ...]:
    """Return the axes along which ranks have the same samples: all but data."""
    return () if sharding is None else sharding.inner_axes


def is_sharded_over_data(sharding: Sharding | None, value: str) -> bool:
    """Return whether each data replica has a shard of a value."""
    return sharding is not None and value in sharding.placements and is_shard(sharding.placements[value].get(DATA, R))


def num_shards(sharding: Sharding | None, value: str, excluded_axis: str = "") -> int | float:
    """Return the number of shards of a value (`Sharding.pieces`), optionally without those of one axis."""
    if sharding is None or value not in sharding.placements:
        return 1
    if not excluded_axis:
        return sharding.num_shards[value]
    forms = sharding.placements[value]
    axes = (axis for axis in tensor_axes(sharding) if axis != excluded_axis)
    return prod(placement.split_factor(sharding.sizes[axis]) for axis in axes if is_disjoint_shard(placement := forms.get(axis, R)))


def num_shards_during_move(sharding: Sharding, op: Operator, move: Redistribution) -> int | float:
    """Return the number of shards of a value along the other tensor axes while it is redistributed along one. Moves run in the order of
    `shardwise.lower.local`: partial sums first, then axis by axis."""
    source, order = sharding.placements[move.value], list(sharding.sizes)
    # A value with a single owner moves right after its operator, before anything reads it.
    need = sharding.input_placements[op.name][op.inputs.index(move.value)] if move.value in op.inputs else source
    count: int | float = 1
    for axis in tensor_axes(sharding):
        if axis != move.axis:
            moves_before = (source[axis] is not P, order.index(axis)) < (move.source is not P, order.index(move.axis))
            placement = (need[axis] if moves_before else None) or source[axis]
            count *= (
                placement.split_factor(sharding.sizes[axis])
                if is_shard(placement)
                else sharding.sizes[axis]
                if is_sharded(placement)
                else 1
            )
    return count


def num_work_shards(sharding: Sharding | None, op: Operator) -> int | float:
    """Return the number of tensor ranks that share an operator's work; if shares are unequal, the whole work over the largest share.
    It is infinite if another rank owns the operator."""
    if sharding is not None and op.name in sharding.off_rank:
        return inf
    return 1 if sharding is None else prod(sharding.work_split(op, axis) for axis in tensor_axes(sharding))
