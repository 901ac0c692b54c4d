"""Inputs of a batch that cannot have a gradient, since an operator that reads them does not provide one."""

from __future__ import annotations

from shardwise.model.gradients import differentiable_inputs
from shardwise.model.graph import Graph, Ref
from shardwise.ops import record_of


def undifferentiable_inputs(graph: Graph) -> frozenset[str]:
    """Return inputs whose gradient torch refuses to compute, as those from which class weights are computed."""
    reached: set[str] = set()
    for op in reversed(graph.operators):
        if any(value in reached for value in op.outputs):
            reached.update(differentiable_inputs(op))
        arguments = (op.args[i] for i in record_of(op).backward.non_differentiable_at if i < len(op.args))
        reached.update(arg.value for arg in arguments if isinstance(arg, Ref))
    return frozenset(v.value for v in graph.inputs if v.value in reached)
