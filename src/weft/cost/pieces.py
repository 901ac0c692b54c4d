"""Into how many pieces the axes of a mesh cut values and the work of operators. In: a sharding, None where nothing is cut. Out: counts."""

from __future__ import annotations

from math import inf, prod

from weft.model.graph import Operator
from weft.model.sharding.sharding import Move, Sharding
from weft.plan.axis import DATA
from weft.plan.placement import P, R, is_cut, is_piece, is_shard


def cut(sharding: Sharding | None, op: str, axis: str) -> bool:
    return sharding is not None and bool(sharding.ops[op].get(axis))


def tensor_axes(sharding: Sharding | None) -> tuple[str, ...]:
    """The axes of ranks that share their samples: all but data."""
    return () if sharding is None else sharding.inner_axes


def shared_by_data(sharding: Sharding | None, value: str) -> bool:
    """Whether data replicas have a piece each of a value."""
    return sharding is not None and value in sharding.forms and is_shard(sharding.forms[value].get(DATA, R))


def pieces(sharding: Sharding | None, value: str, but: str = "") -> int | float:
    """As `Sharding.pieces`, along all of its axes `but` one."""
    if sharding is None or value not in sharding.forms:
        return 1
    if not but:
        return sharding.pieces[value]
    forms = sharding.forms[value]
    return prod(form.ways(sharding.sizes[axis]) for axis in tensor_axes(sharding) if axis != but and is_piece(form := forms.get(axis, R)))


def pieces_moving(sharding: Sharding, op: Operator, move: Move) -> int | float:
    """Pieces that a value is cut into along the other tensor axes while it moves along one: what moves before and after says
    `weft.lower.local`, summands first, then axis by axis."""
    source, order = sharding.forms[move.value], list(sharding.sizes)
    # What leaves its owner moves where it is made, before anything reads it.
    need = sharding.needs[op.name][op.inputs.index(move.value)] if move.value in op.inputs else source
    ways: int | float = 1
    for axis in tensor_axes(sharding):
        if axis != move.axis:
            before = (source[axis] is not P, order.index(axis)) < (move.source is not P, order.index(move.axis))
            form = (need[axis] if before else None) or source[axis]
            ways *= form.ways(sharding.sizes[axis]) if is_shard(form) else sharding.sizes[axis] if is_cut(form) else 1
    return ways


def work_ways(sharding: Sharding | None, op: Operator) -> int | float:
    """Tensor ranks among which an operator's work is divided; where it is unequally, the whole over the most that a rank has. As for
    `pieces`, nothing is left of what another rank owns than the busiest one."""
    if sharding is not None and op.name in sharding.elsewhere:
        return inf
    return 1 if sharding is None else prod(sharding.ways(op, axis) for axis in tensor_axes(sharding))
