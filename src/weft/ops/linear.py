"""In which of their tensors operators are linear, so that summands pass through them. In: an operator. Out: values that it reads."""

from __future__ import annotations

from collections.abc import Container, Sequence

from weft.ops import record_of
from weft.ops.operator import Operator, Ref
from weft.plan.placement import D, P, Placement, R, is_shard


def sums(op: Operator) -> bool:
    """Whether an operator adds what it reads, numbers too."""
    return record_of(op).linear == "sum"


def together(op: Operator, zeros: Container[str] = frozenset()) -> list[str] | None:
    """Of an operator that is linear in some of its tensors together, which these are; None of others. `zeros`: values that are zero."""
    how = record_of(op).linear
    values: tuple[str, ...] | None = None
    if callable(how):
        values = how(op, zeros)
    elif how == "together" or (how == "sum" and len(op.inputs) == 2):
        values = op.inputs
    return None if values is None else [v for v in values if v not in zeros]


def each(op: Operator) -> tuple[int, ...]:
    """Numbers of the tensors in each of which an operator is linear by itself, the others being what they are: factors, a numerator.

    >>> each(Operator("d", "aten.div.Tensor", (Ref("a"), Ref("b")), (), ("d",), "d"))
    (0,)
    """
    how = record_of(op).linear
    if how == "each":
        return tuple(range(len(op.inputs)))
    if how == "numerator" and "rounding_mode" not in dict(op.kwargs):
        return (0,) if op.args and isinstance(op.args[0], Ref) else ()
    return ()


def passing(op: Operator, grads: Container[str]) -> list[tuple[Placement, ...]]:
    """Placements in which an operator can read its tensors so that it makes summands of summands; `grads`: values that have a gradient."""
    carried = together(op)
    if carried:
        return [tuple(P if v in carried else R for v in op.inputs)]
    beside = [D if v in grads else R for v in op.inputs]
    return [(*beside[:i], P, *beside[i + 1 :]) for i in each(op)]


def passes(needs: Sequence[Placement | None], there: Sequence[Sequence[Placement]]) -> bool:
    """Whether such a read follows from what is there: a summand, and nothing that lies in pieces."""
    return any(need is P and P in forms for need, forms in zip(needs, there, strict=True)) and not any(is_shard(f[0]) for f in there)
