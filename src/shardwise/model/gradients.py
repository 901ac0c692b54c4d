"""Gradient flow in a graph: which values can have a gradient, and which parameters get one."""

from __future__ import annotations

from shardwise.model.graph import Graph, Operator
from shardwise.ops import record_of


def differentiable_inputs(op: Operator) -> tuple[str, ...]:
    """Return the inputs to which an operator passes gradients: not detached ones, nor those whose shape alone it reads (`zeros_like`)."""
    return op.inputs[: record_of(op).backward.num_differentiable]


def values_needing_gradient(graph: Graph) -> set[str]:
    """Return values that may need a gradient: floating point, and computed from a trainable parameter or a floating-point input."""
    values = {v.value for v in graph.parameters if v.trainable and v.tensor.is_float}
    values |= {v.value for v in graph.inputs if v.tensor.is_float}
    dtypes = ("float", "bfloat", "complex")
    for op in graph.operators:
        if not any(value in values for value in differentiable_inputs(op)):
            continue
        values.update(value for value in op.outputs if graph.tensors[value].dtype.startswith(dtypes))
    return values


def parameters_with_gradient(graph: Graph) -> set[str]:
    """Return the parameters that the loss (or an output) depends on differentiably. The others are not updated, as in plain PyTorch."""
    reached = values_on_backward_path(graph, values_needing_gradient(graph))
    return {v.value for v in graph.parameters if v.trainable and v.value in reached}


def values_on_backward_path(graph: Graph, differentiable: set[str]) -> set[str]:
    """Return the loss (or outputs) and every value to which backward passes a gradient; `grads`: values that can have one."""
    reached = {graph.loss, *graph.outputs}
    for op in reversed(graph.operators):
        if any(value in reached and value in differentiable for value in op.outputs):
            reached.update(differentiable_inputs(op))
    return reached
