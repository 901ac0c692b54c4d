"""Where gradients go in a graph: which values can have one, and which parameters get one. In: a graph. Out: names of values."""

from __future__ import annotations

from weft.model.graph import Graph, Operator
from weft.ops import record_of


def learns_by(op: Operator) -> tuple[str, ...]:
    """What an operator reads and hands gradients on to: not what it detaches, nor that of which it takes but the shape (`zeros_like`)."""
    return op.inputs[: record_of(op).learns]


def needs_gradient(graph: Graph) -> set[str]:
    """Values whose gradient may be asked for: floating point, and made from a trainable parameter or a floating-point input."""
    values = {v.value for v in graph.parameters if v.trainable and v.tensor.is_float}
    values |= {v.value for v in graph.inputs if v.tensor.is_float}
    grounds = ("float", "bfloat", "complex")
    for op in graph.operators:
        if not any(value in values for value in learns_by(op)):
            continue
        values.update(value for value in op.outputs if graph.tensors[value].dtype.startswith(grounds))
    return values


def learned(graph: Graph) -> set[str]:
    """Values of the parameters that the loss (or an output) depends on by a gradient. The others stay as they are, as in plain PyTorch."""
    reached = backward_reached(graph, needs_gradient(graph))
    return {v.value for v in graph.parameters if v.trainable and v.value in reached}


def backward_reached(graph: Graph, grads: set[str]) -> set[str]:
    """The loss (or the outputs) and every value from which it follows by operators that hand a gradient on; `grads`: that can have one."""
    reached = {graph.loss, *graph.outputs}
    for op in reversed(graph.operators):
        if any(value in reached and value in grads for value in op.outputs):
            reached.update(learns_by(op))
    return reached
