"""Inputs of a batch that cannot have a gradient, since an operator that reads them does not provide one."""

from __future__ import annotations

from weft.model.gradients import learns_by
from weft.model.graph import Graph, Ref
from weft.ops import record_of


def without_gradient(graph: Graph) -> frozenset[str]:
    """Return inputs whose gradient torch refuses to compute, as those from which class weights are computed."""
    reached: set[str] = set()
    for op in reversed(graph.operators):
        if any(value in reached for value in op.outputs):
            reached.update(learns_by(op))
        arguments = (op.args[i] for i in record_of(op).closed if i < len(op.args))
        reached.update(arg.value for arg in arguments if isinstance(arg, Ref))
    return frozenset(v.value for v in graph.inputs if v.value in reached)
