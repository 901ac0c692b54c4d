"""Numbers of shards into which mesh axes divide values and the work of operators. A sharding of None means that nothing is sharded."""

from __future__ import annotations

from math import inf, prod

from weft.model.graph import Operator
from weft.model.sharding.sharding import Move, Sharding
from weft.plan.axis import DATA
from weft.plan.placement import P, R, is_cut, is_piece, is_shard


def cut(sharding: Sharding | None, op: str, axis: str) -> bool:  # whether operator `op` is sharded over `axis`
    return sharding is not None and bool(sharding.ops[op].get(axis))


def tensor_axes(sharding: Sharding | None) -> tuple[str, ...]:
    """Return the axes along which ranks have the same samples: all but data."""
    return () if sharding is None else sharding.inner_axes


def shared_by_data(sharding: Sharding | None, value: str) -> bool:
    """Return whether each data replica has a shard of a value."""
    return sharding is not None and value in sharding.forms and is_shard(sharding.forms[value].get(DATA, R))


def pieces(sharding: Sharding | None, value: str, but: str = "") -> int | float:
    """Return the number of shards of a value (`Sharding.pieces`), optionally without those of one axis."""
    if sharding is None or value not in sharding.forms:
        return 1
    if not but:
        return sharding.pieces[value]
    forms = sharding.forms[value]
    axes = (axis for axis in tensor_axes(sharding) if axis != but)
    return prod(placement.ways(sharding.sizes[axis]) for axis in axes if is_piece(placement := forms.get(axis, R)))


def pieces_moving(sharding: Sharding, op: Operator, move: Move) -> int | float:
    """Return the number of shards of a value along the other tensor axes while it is redistributed along one. Moves run in the order of
    `weft.lower.local`: partial sums first, then axis by axis."""
    source, order = sharding.forms[move.value], list(sharding.sizes)
    # A value with a single owner moves right after its operator, before anything reads it.
    need = sharding.needs[op.name][op.inputs.index(move.value)] if move.value in op.inputs else source
    count: int | float = 1
    for axis in tensor_axes(sharding):
        if axis != move.axis:
            moves_before = (source[axis] is not P, order.index(axis)) < (move.source is not P, order.index(move.axis))
            placement = (need[axis] if moves_before else None) or source[axis]
            count *= placement.ways(sharding.sizes[axis]) if is_shard(placement) else sharding.sizes[axis] if is_cut(placement) else 1
    return count


def work_ways(sharding: Sharding | None, op: Operator) -> int | float:
    """Return the number of tensor ranks that share an operator's work; if shares are unequal, the whole work over the largest share.
    It is infinite if another rank owns the operator."""
    if sharding is not None and op.name in sharding.elsewhere:
        return inf
    return 1 if sharding is None else prod(sharding.ways(op, axis) for axis in tensor_axes(sharding))
