"""Memory format of values: which inputs are copied because their dimension order differs, and what is then saved.

From a graph whose capture noted the strides of every value: copies in place of requested views, contiguous copies made by products, and the
dimension order of gradients. Not modeled: gradients summed from several readers (the last reader's is used).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from shardwise.model.gradients import differentiable_values
from shardwise.model.graph import Graph, Operator, Tensor
from shardwise.model.work import kind_of
from shardwise.ops import record_of
from shardwise.ops.attention import attention_mask_of, has_score_dropout
from shardwise.ops.vocabulary import ViewKind

Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return strides_in_order(shape, range(len(shape)))


def strides_in_order(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """Return the strides of a dense tensor with this dimension order, outermost first.

    >>> strides_in_order((2, 3, 4), (0, 2, 1))
    (12, 1, 3)
    """
    strides, size = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = size
        size *= shape[dim]
    return tuple(strides)


def dim_order(shape: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Return the dimensions larger than one, outermost first.

    >>> dim_order((2, 3, 1, 4), (12, 1, 1, 3))
    (0, 3, 1)
    """
    return tuple(sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: (-strides[d], d)))


def without_gaps(tensor: Tensor) -> Tensor:
    """Return the spec of an output in another tensor's dimension order, without gaps between its elements.

    >>> without_gaps(Tensor((2, 3, 4), "float32", (24, 1, 6))).strides, without_gaps(Tensor((2, 3), "float32", (9, 1))).strides
    ((12, 1, 3), ())
    """
    shape, order = tensor.shape, dim_order(tensor.shape, tensor.strides) if tensor.strides else ()
    ordered = strides_in_order(shape, (*(d for d in range(len(shape)) if d not in order), *order)) if order else ()
    return replace(tensor, strides=() if ordered == contiguous_strides(shape) else ordered)


def view_strides(shape: Sequence[int], strides: Strides, target_shape: Sequence[int]) -> Strides | None:
    """Return the strides of a view in another shape of equal size; None where that needs a copy.

    >>> view_strides((2, 3, 4), (12, 4, 1), (6, 4)), view_strides((2, 3, 4), (4, 8, 1), (6, 4)), view_strides((6, 4), (1, 6), (2, 3, 4))
    ((4, 1), None, (3, 1, 6))
    """
    steps: list[int] = []
    at = len(target_shape) - 1
    dims = [d for d in range(len(shape)) if shape[d] != 1]
    while dims:
        size, base = shape[dims[-1]], strides[dims[-1]]
        last = dims.pop()
        while dims and strides[dims[-1]] == strides[last] * shape[last]:
            last = dims.pop()
            size *= shape[last]
        while at >= 0 and (size > 1 or target_shape[at] == 1):
            steps.append(base)
            if size % target_shape[at]:
                return None
            size, base, at = size // target_shape[at], base * target_shape[at], at - 1
        if size > 1:
            return None
    steps += [1] * (at + 1)
    return tuple(reversed(steps))


@dataclass(frozen=True)
class GraphStrides:
    """Memory formats in one graph."""

    graph: Graph

    @cached_property
    def composed_attention(self) -> frozenset[str]:
        """Attention operators that CPUs compose of products and a softmax, for want of a kernel: with dropout, or a mask that needs a
        gradient."""
        grads = differentiable_values(self.graph)
        return frozenset(op.name for op in self.graph.operators if has_score_dropout(op) or attention_mask_of(op) in grads)

    @cached_property
    def copied_values(self) -> frozenset[str]:
        """Values with memory of their own, computed by operators that otherwise return a view."""
        values = set()
        for op in self.graph.operators:
            moves, source = record_of(op).view.kind, self.graph.tensors[op.inputs[0]] if op.inputs else None
            if source is not None and source.strides and moves in (ViewKind.CONTIGUOUS, ViewKind.RESHAPE):
                for value in op.outputs:
                    if moves == ViewKind.CONTIGUOUS or view_strides(source.shape, source.strides, self.graph.tensors[value].shape) is None:
                        values.add(value)
        return frozenset(values)

    def strides_of(self, value: str) -> Strides:
        return self.graph.tensors[value].strides or contiguous_strides(self.graph.tensors[value].shape)

    def row_copies(self, op: Operator) -> frozenset[str]:
        """Return operands that a product makes contiguous before it reads them, and saves as such."""
        rows, tensors = record_of(op).product.contiguous_operands, self.graph.tensors
        if not rows or not any(tensors[v].strides for v in op.inputs[:2]):
            return frozenset()
        values = []
        for value, other in zip(op.inputs[:rows], (op.inputs[1], op.inputs[0]), strict=False):
            shape = list(tensors[value].shape)
            if len(shape) > 2:
                num_inner = 1 if rows == 1 or len(tensors[other].shape) < 3 else 2  # dimensions that are not merged
                if view_strides(shape, self.strides_of(value), [prod(shape[:-num_inner]), *shape[-num_inner:]]) is None:
                    values.append(value)
        return frozenset(values)

    def has_channels_last(self, value: str) -> bool:
        """Return whether a possible image is stored channels-last."""
        shape, strides = self.graph.tensors[value].shape, self.graph.tensors[value].strides
        if not strides or len(shape) not in (4, 5):
            return False
        return dim_order(shape, strides) == dim_order(shape, strides_in_order(shape, (0, *range(2, len(shape)), 1)))

    @cached_property
    def gradient_strides(self) -> Mapping[str, Strides]:
        """Strides, by value, of the gradients that are not in dimension order."""
        by_value: dict[str, Strides] = {}
        visited: set[str] = set()
        for op in reversed(self.graph.operators):
            for at, value in enumerate(op.inputs):
                if value not in visited:  # by the last reader
                    visited.add(value)
                    strides = self._gradient_strides_of(op, at, by_value)
                    shape = self.graph.tensors[value].shape
                    if strides is not None and dim_order(shape, strides) != dim_order(shape, contiguous_strides(shape)):
                        by_value[value] = strides
        return by_value

    def _gradient_strides_of(self, op: Operator, at: int, gradients: Mapping[str, Strides]) -> Strides | None:
        record, value, out, tensors = record_of(op), op.inputs[at], op.outputs[0], self.graph.tensors
        shape = tensors[value].shape
        if record.backward.gradient_dim_order is not None:
            orders = record.backward.gradient_dim_order(op)
            return strides_in_order(shape, orders[at]) if orders else None
        if record.view.permutation is not None:
            order, output_strides = record.view.permutation(op, len(shape)), gradients.get(out) or contiguous_strides(tensors[out].shape)
            return tuple(output_strides[order.index(d)] for d in range(len(shape)))
        if kind_of(op) == "convolution":
            return self.strides_of(value) if self.has_channels_last(value) else None
        if out in gradients and tensors[out].shape == shape and kind_of(op) in ("elementwise", "activation"):
            return gradients[out]
        return None

    def transposes_saved(self, op: Operator) -> bool:
        """Return whether the gradient of an operator's output has another dimension order than its saved input."""
        out, x = op.outputs[0], op.inputs[0]
        shape = self.graph.tensors[out].shape
        if out not in self.gradient_strides and not self.graph.tensors[x].strides:
            return False
        return dim_order(shape, self.gradient_strides.get(out) or contiguous_strides(shape)) != dim_order(
            self.graph.tensors[x].shape, self.strides_of(x)
        )
