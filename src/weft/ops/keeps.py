"""Tensors that an operator saves for backward: values of the graph, and bytes of those that are none (masks, logarithms, gates). Each rule
takes a call, its tensors and the values that have a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from math import prod

from weft.ops.operator import Operator, Ref, Tensor

Kept = tuple[tuple[str, ...], float]
Keeps = Callable[[Operator, Mapping[str, Tensor], Set[str]], Kept]


def floats(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return all inputs that are differentiable."""
    return tuple(v for v in dict.fromkeys(op.inputs) if tensors[v].can_learn), 0.0


def others(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return masks and indices only."""
    return tuple(v for v in dict.fromkeys(op.inputs) if not tensors[v].can_learn), 0.0


def output(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the first output."""
    return op.outputs[:1], 0.0


def both(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return inputs and output."""
    return (*floats(op, tensors, grads)[0], op.outputs[0]), 0.0


def choices(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the chosen indices where they are an output; else the inputs."""
    if len(op.outputs) > 1:
        return tuple(v for v in op.outputs if not tensors[v].can_learn), 0.0
    return floats(op, tensors, grads)


def nothing(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return nothing."""
    return (), 0.0


def inputs(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return all inputs."""
    return tuple(dict.fromkeys(op.inputs)), 0.0


def behind_first(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return all inputs except the first."""
    return op.inputs[1:], 0.0


def normalised(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the normalized input, and means and deviations where they are outputs."""
    return (*op.inputs[:1], *op.outputs[1:3]), 0.0


def first_and_others(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the source of the rows and their indices."""
    return (*op.inputs[:1], *others(op, tensors, grads)[0]), 0.0


def operands(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return each operand of a product whose other operand has a gradient."""
    return _factors([a.value for a in op.args if isinstance(a, Ref)][:2], grads), 0.0


def operands_behind_first(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the same for a product that is added to its first argument."""
    return _factors([a.value for a in op.args if isinstance(a, Ref)][1:3], grads), 0.0


def operands_of_list(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the same for a product of all inputs."""
    return _factors(list(dict.fromkeys(op.inputs)), grads), 0.0


def quotient(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return both operands of a quotient if the divisor has a gradient; else as for a product."""
    read = [a.value for a in op.args if isinstance(a, Ref)][:2]
    return (tuple(dict.fromkeys(read)), 0.0) if len(read) == 2 and read[1] in grads else operands(op, tensors, grads)


def _factors(read: list[str], grads: Set[str]) -> tuple[str, ...]:
    if len(read) == 2 and read[0] == read[1]:
        return (read[0],)
    return tuple(dict.fromkeys(v for i, v in enumerate(read) if any(o in grads for j, o in enumerate(read) if j != i)))


def mask(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the bytes of a mask of elements, one byte each."""
    return (), float(tensors[op.outputs[0]].size)


def mask_of_channels(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the bytes of a mask of channels, one number each."""
    return (), tensors[op.outputs[0]].size_bytes / prod(tensors[op.outputs[0]].shape[2:])


def largest(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the input of a max pool, and bytes of the indices (8 each) where they are no output."""
    return tuple(dict.fromkeys(op.inputs))[:1], 0.0 if len(op.outputs) > 1 else 8.0 * tensors[op.outputs[0]].size


def mean_of_windows(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Return the input of an average pool; nothing for a global one."""
    return ((), 0.0) if all(n == 1 for n in tensors[op.outputs[0]].shape[2:]) else floats(op, tensors, grads)
