"""Linearity of operators: through which inputs partial sums pass, so that an all-reduce can be deferred."""

from __future__ import annotations

from collections.abc import Container, Sequence

from shardwise.ops import record_of
from shardwise.ops.operator import Operator, Ref
from shardwise.ops.vocabulary import Linearity
from shardwise.plan.ir.placement import D, P, Placement, R, is_shard


def is_sum(op: Operator) -> bool:
    """Return whether an operator adds its inputs, numbers too."""
    return record_of(op).linear == Linearity.SUM


def jointly_linear_in(op: Operator, zeros: Container[str] = frozenset()) -> list[str] | None:
    """Return the inputs in which an operator is jointly linear; None if there are none. `zeros`: values that are zero."""
    linear = record_of(op).linear
    values: tuple[str, ...] | None = None
    if callable(linear):
        values = linear(op, zeros)
    elif linear == Linearity.JOINT or (linear == Linearity.SUM and len(op.inputs) == 2):
        values = op.inputs
    return None if values is None else [v for v in values if v not in zeros]


def separately_linear_in(op: Operator) -> tuple[int, ...]:
    """Return the indices of the tensors in each of which an operator is linear with the others fixed: factors, a numerator.

    >>> separately_linear_in(Operator("d", "aten.div.Tensor", (Ref("a"), Ref("b")), (), ("d",), "d"))
    (0,)
    """
    linear = record_of(op).linear
    if linear == Linearity.MULTILINEAR:
        return tuple(range(len(op.inputs)))
    if linear == Linearity.NUMERATOR and "rounding_mode" not in dict(op.kwargs):
        return (0,) if op.args and isinstance(op.args[0], Ref) else ()
    return ()


def partial_placements(op: Operator, grads: Container[str]) -> list[tuple[Placement, ...]]:
    """Return input placements with which an operator maps partial sums to partial sums; `grads`: values that have a gradient."""
    jointly_linear = jointly_linear_in(op)
    if jointly_linear:
        return [tuple(P if v in jointly_linear else R for v in op.inputs)]
    fixed = [D if v in grads else R for v in op.inputs]
    return [(*fixed[:i], P, *fixed[i + 1 :]) for i in separately_linear_in(op)]


def reads_partial(needed: Sequence[Placement | None], available: Sequence[Sequence[Placement]]) -> bool:
    """Return whether these inputs follow from the available placements: a partial sum, and no shards."""
    return any(need is P and P in forms for need, forms in zip(needed, available, strict=True)) and not any(
        is_shard(f[0]) for f in available
    )
