"""What an operator keeps for backward. In: a call, its tensors, the values that have a gradient. Out: values of the graph, and bytes of
what is no value of it (masks, logarithms, gates)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from math import prod

from weft.ops.operator import Operator, Ref, Tensor

Kept = tuple[tuple[str, ...], float]
Keeps = Callable[[Operator, Mapping[str, Tensor], Set[str]], Kept]


def floats(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Whatever it reads that can learn."""
    return tuple(v for v in dict.fromkeys(op.inputs) if tensors[v].can_learn), 0.0


def others(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Masks and indices alone."""
    return tuple(v for v in dict.fromkeys(op.inputs) if not tensors[v].can_learn), 0.0


def output(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """What it makes."""
    return op.outputs[:1], 0.0


def both(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """What it reads and what it makes."""
    return (*floats(op, tensors, grads)[0], op.outputs[0]), 0.0


def choices(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Which it chose, where it tells; else what it read."""
    if len(op.outputs) > 1:
        return tuple(v for v in op.outputs if not tensors[v].can_learn), 0.0
    return floats(op, tensors, grads)


def nothing(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Nothing at all."""
    return (), 0.0


def inputs(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """All that it reads."""
    return tuple(dict.fromkeys(op.inputs)), 0.0


def behind_first(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """All that it reads but the first."""
    return op.inputs[1:], 0.0


def normalised(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """What is normalised; means and deviations, where they are values of the graph."""
    return (*op.inputs[:1], *op.outputs[1:3]), 0.0


def first_and_others(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """What rows are taken from, and which."""
    return (*op.inputs[:1], *others(op, tensors, grads)[0]), 0.0


def operands(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Of a product each operand whose other one has a gradient."""
    return _factors([a.value for a in op.args if isinstance(a, Ref)][:2], grads), 0.0


def operands_behind_first(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """The same of a product that is added to its first argument."""
    return _factors([a.value for a in op.args if isinstance(a, Ref)][1:3], grads), 0.0


def operands_of_list(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """The same of a product of all that it reads."""
    return _factors(list(dict.fromkeys(op.inputs)), grads), 0.0


def quotient(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Of a quotient both, where what it is divided by has a gradient."""
    read = [a.value for a in op.args if isinstance(a, Ref)][:2]
    return (tuple(dict.fromkeys(read)), 0.0) if len(read) == 2 and read[1] in grads else operands(op, tensors, grads)


def _factors(read: list[str], grads: Set[str]) -> tuple[str, ...]:
    if len(read) == 2 and read[0] == read[1]:
        return (read[0],)
    return tuple(dict.fromkeys(v for i, v in enumerate(read) if any(o in grads for j, o in enumerate(read) if j != i)))


def mask(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Which elements are kept, a byte each."""
    return (), float(tensors[op.outputs[0]].size)


def mask_of_channels(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """A number for each channel that is kept or dropped."""
    return (), tensors[op.outputs[0]].size_bytes / prod(tensors[op.outputs[0]].shape[2:])


def largest(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """Of windows: what was read, and where the largest stand, eight bytes each, where they are no value of the graph."""
    return tuple(dict.fromkeys(op.inputs))[:1], 0.0 if len(op.outputs) > 1 else 8.0 * tensors[op.outputs[0]].size


def mean_of_windows(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Kept:
    """What was read; nothing where each map has one mean."""
    return ((), 0.0) if all(n == 1 for n in tensors[op.outputs[0]].shape[2:]) else floats(op, tensors, grads)
