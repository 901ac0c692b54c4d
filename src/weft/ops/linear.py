"""In which of their tensors operators are linear, so that summands pass through them. In: an operator. Out: values that it reads."""

from __future__ import annotations

from collections.abc import Container, Sequence

from weft.ops.operator import Operator, Ref
from weft.ops.views import VIEWS
from weft.plan.placement import D, P, Placement, R, is_shard

# Linear in all their tensors together.
TOGETHER = frozenset((*VIEWS, *"neg clone contiguous to _to_copy detach alias sum mean flip".split())) - {"pad", "constant_pad_nd"}
SUMS = frozenset("add sub rsub".split())
PRODUCTS = frozenset("mm bmm mv dot outer".split())
_EACH = PRODUCTS | frozenset("mul multiply matmul einsum".split())
_QUOTIENTS = frozenset("div divide true_divide".split())
# Operators whose output is the sum over a contracted label, so that a cut leaves summands.
_CONTRACT = frozenset(
    """
    linear mm bmm mv dot vdot inner tensordot matmul einsum sum mean conv1d conv2d conv3d bilinear nansum count_nonzero
    binary_cross_entropy binary_cross_entropy_with_logits kl_div
    """.split()
)


def leaves_summands(name: str) -> bool:
    """Whether an operator's output is the sum over a label that it contracts."""
    return name in _CONTRACT or name.endswith("_loss")


def together(op: Operator, zeros: Container[str] = frozenset()) -> list[str] | None:
    """Of an operator that is linear in some of its tensors together, which these are; None of others. `zeros`: values that are zero."""
    name = op.target.split(".")[1]
    values: tuple[str, ...] = op.inputs
    if name == "where":
        if not all(isinstance(a, Ref) or a == 0 for a in op.args) or not op.inputs:
            return None
        values = op.inputs[1:]
    elif name == "masked_fill":
        filled = op.args[2]
        if not (filled.value in zeros if isinstance(filled, Ref) else filled == 0):
            return None
        values = op.inputs[:1]
    elif name == "index_put":
        if len(op.args) != 3 or not isinstance(op.args[2], Ref) or op.args[2].value not in zeros:
            return None
        values = op.inputs[:1]
    elif name not in TOGETHER and not (name in SUMS and len(op.inputs) == 2):
        return None
    return [v for v in values if v not in zeros]


def each(op: Operator) -> tuple[int, ...]:
    """Numbers of the tensors in each of which an operator is linear by itself, the others being what they are: factors, a numerator.

    >>> each(Operator("d", "aten.div.Tensor", (Ref("a"), Ref("b")), (), ("d",), "d"))
    (0,)
    """
    name = op.target.split(".")[1]
    if name in _EACH:
        return tuple(range(len(op.inputs)))
    if name in _QUOTIENTS and "rounding_mode" not in dict(op.kwargs):
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
