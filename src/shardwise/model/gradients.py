"""Gradient flow in a graph: which values can have a gradient, which parameters get one, and which inputs of a batch cannot have one."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.model.dataflow import propagate_backward, propagate_forward
from shardwise.model.graph import Graph, Operator, Ref
from shardwise.ops import record_of


def differentiable_inputs(op: Operator) -> tuple[str, ...]:
    """Return the inputs to which an operator passes gradients: not detached ones, nor those whose shape alone it reads (`zeros_like`)."""
    return op.inputs[: record_of(op).backward.num_differentiable]


def values_depending_on(graph: Graph, start: Iterable[str]) -> set[str]:
    """Return `start` and the values that depend on it differentiably."""

    def reads(op: Operator) -> tuple[str, ...]:
        return differentiable_inputs(op) if any(graph.tensors[v].is_differentiable for v in op.outputs) else ()

    return propagate_forward(graph.operators, start, reads)


def differentiable_values(graph: Graph) -> set[str]:
    """Return values whose gradient backward computes: those on a differentiable path from a trainable parameter to the loss.

    Complex numbers have gradients as real ones do. See `differentiable_inputs` for inputs without one.
    """
    reached = values_depending_on(graph, {v.value for v in graph.parameters if v.trainable})
    wanted = propagate_backward(graph.operators, {graph.loss, *graph.outputs}, differentiable_inputs)
    return {value for value in reached & wanted if graph.tensors[value].is_differentiable}


def values_needing_gradient(graph: Graph) -> set[str]:
    """Return values that may need a gradient: floating point, and computed from a trainable parameter or a floating-point input."""
    variables = (*(v for v in graph.parameters if v.trainable), *graph.inputs)

    def writes(op: Operator) -> list[str]:
        return [value for value in op.outputs if graph.tensors[value].is_differentiable]

    return propagate_forward(graph.operators, {v.value for v in variables if v.tensor.is_float}, differentiable_inputs, writes)


def parameters_with_gradient(graph: Graph) -> set[str]:
    """Return the parameters that the loss (or an output) depends on differentiably. The others are not updated, as in plain PyTorch."""
    reached = values_on_backward_path(graph, values_needing_gradient(graph))
    return {v.value for v in graph.parameters if v.trainable and v.value in reached}


def values_on_backward_path(graph: Graph, differentiable: set[str]) -> set[str]:
    """Return the loss (or outputs) and every value to which backward passes a gradient; `differentiable`: values that can have one."""
    ends = {graph.loss, *graph.outputs}
    return propagate_backward(graph.operators, ends, differentiable_inputs, lambda op: differentiable.intersection(op.outputs))


def undifferentiable_inputs(graph: Graph) -> frozenset[str]:
    """Return inputs whose gradient torch refuses to compute, as those from which class weights are computed."""
    arguments = (op.args[i] for op in graph.operators for i in record_of(op).backward.non_differentiable_at if i < len(op.args))
    reached = propagate_backward(graph.operators, [arg.value for arg in arguments if isinstance(arg, Ref)], differentiable_inputs)
    return frozenset(v.value for v in graph.inputs if v.value in reached)
