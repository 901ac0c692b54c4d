"""Which inputs of a batch cannot have a gradient, since an operator that reads them has none to give. In: a graph. Out: values."""

from __future__ import annotations

from weft.model.gradients import learns_by
from weft.model.graph import Graph, Ref

# operator -> positions of floating-point arguments by which torch does not differentiate, and says so
_CLOSED = {
    "cross_entropy_loss": (2,), "nll_loss": (2,), "nll_loss_nd": (2,), "nll_loss2d": (2,), "binary_cross_entropy": (2,),
    "soft_margin_loss": (1,), "multi_margin_loss": (4,), "bucketize": (0, 1), "searchsorted": (0, 1),
}  # fmt: skip


def without_gradient(graph: Graph) -> frozenset[str]:
    """Inputs whose gradient torch refuses to compute: those that class weights are made of, for example."""
    reached: set[str] = set()
    for op in reversed(graph.operators):
        name = op.target.split(".")[1]
        if any(value in reached for value in op.outputs):
            reached.update(learns_by(op))
        given = (op.args[i] for i in _CLOSED.get(name, ()) if i < len(op.args))
        reached.update(arg.value for arg in given if isinstance(arg, Ref))
    return frozenset(v.value for v in graph.inputs if v.value in reached)
