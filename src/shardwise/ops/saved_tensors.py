"""Tensors that an operator saves for backward: values of the graph, and bytes of those that are none (masks, logarithms, gates). Each rule
takes a call, its tensors and the values that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from math import prod

from shardwise.ops.operator import Operator, Ref, Tensor

Saved = tuple[tuple[str, ...], float]
SavedRule = Callable[[Operator, Mapping[str, Tensor], Set[str]], Saved]


def float_inputs(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return all inputs that are differentiable."""
    return tuple(v for v in dict.fromkeys(op.inputs) if tensors[v].is_differentiable), 0.0


def integer_inputs(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return masks and indices only."""
    return tuple(v for v in dict.fromkeys(op.inputs) if not tensors[v].is_differentiable), 0.0


def first_output(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the first output."""
    return op.outputs[:1], 0.0


def inputs_and_output(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return inputs and output."""
    return (*float_inputs(op, tensors, grads)[0], op.outputs[0]), 0.0


def chosen_indices(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the chosen indices where they are an output; else the inputs."""
    if len(op.outputs) > 1:
        return tuple(v for v in op.outputs if not tensors[v].is_differentiable), 0.0
    return float_inputs(op, tensors, grads)


def no_tensors(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return nothing."""
    return (), 0.0


def all_inputs(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return all inputs."""
    return tuple(dict.fromkeys(op.inputs)), 0.0


def inputs_after_first(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return all inputs except the first."""
    return op.inputs[1:], 0.0


def input_and_statistics(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the normalized input, and means and deviations where they are outputs."""
    return (*op.inputs[:1], *op.outputs[1:3]), 0.0


def source_and_indices(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the source of the rows and their indices."""
    return (*op.inputs[:1], *integer_inputs(op, tensors, grads)[0]), 0.0


def product_operands(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return each operand of a product whose other operand has a gradient."""
    return _needed_factors([a.value for a in op.args if isinstance(a, Ref)][:2], grads), 0.0


def added_product_operands(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the same for a product that is added to its first argument."""
    return _needed_factors([a.value for a in op.args if isinstance(a, Ref)][1:3], grads), 0.0


def listed_operands(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the same for a product of all inputs."""
    return _needed_factors(list(dict.fromkeys(op.inputs)), grads), 0.0


def quotient_operands(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return both operands of a quotient if the divisor has a gradient; else as for a product."""
    read = [a.value for a in op.args if isinstance(a, Ref)][:2]
    return (tuple(dict.fromkeys(read)), 0.0) if len(read) == 2 and read[1] in grads else product_operands(op, tensors, grads)


def _needed_factors(read: list[str], grads: Set[str]) -> tuple[str, ...]:
    if len(read) == 2 and read[0] == read[1]:
        return (read[0],)
    return tuple(dict.fromkeys(v for i, v in enumerate(read) if any(o in grads for j, o in enumerate(read) if j != i)))


def element_mask(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the bytes of a mask of elements, one byte each."""
    return (), float(tensors[op.outputs[0]].size)


def channel_mask(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the bytes of a mask of channels, one number each."""
    return (), tensors[op.outputs[0]].size_bytes / prod(tensors[op.outputs[0]].shape[2:])


def window_indices(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the input of a max pool, and bytes of the indices (8 each) where they are no output."""
    return tuple(dict.fromkeys(op.inputs))[:1], 0.0 if len(op.outputs) > 1 else 8.0 * tensors[op.outputs[0]].size


def window_mean_input(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the input of an average pool; nothing for a global one."""
    return ((), 0.0) if all(n == 1 for n in tensors[op.outputs[0]].shape[2:]) else float_inputs(op, tensors, grads)
