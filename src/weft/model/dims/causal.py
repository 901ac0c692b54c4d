"""Detection of causal attention masks: whether queries attend to keys up to their own position only.

Derived from how the mask is computed: a comparison of key positions with query positions, combined with any other mask (padding). A mask
that also hides earlier keys (a window) is not causal. Ranks may then balance causal attention by zigzag position order; nothing else
depends on it, so an undetected mask costs time only.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.model.graph import Graph, Operator
from weft.ops import record_of
from weft.ops.attention import is_causal, mask_of
from weft.ops.record import ALL_HOLD, AT_LEAST, AT_MOST, COUNTS, FILLS, LOWER, NOT

LATER, EARLIER = "later", "earlier"


def hides_later(graph: Graph, makers: Mapping[str, Operator], op: Operator) -> bool:
    """Return whether attention is causal, by its flag or by its mask. `makers`: by value, its producer."""
    mask = mask_of(op)
    return is_causal(op) or (mask is not None and _hidden(graph, makers, mask, True) == {LATER})


def _hidden(graph: Graph, makers: Mapping[str, Operator], value: str, holds: bool) -> set[str]:
    """Return which keys a mask [..., queries, keys] hides by position (`LATER`, `EARLIER`); `holds`: the value of the mask at visible
    keys."""
    op = makers.get(value)
    if op is None or not op.inputs:
        return set()
    predicate = record_of(op).tells
    if predicate in (AT_MOST, AT_LEAST):
        first, second = op.inputs[0], op.inputs[-1]
        for keys, queries, at_most in ((first, second, predicate == AT_MOST), (second, first, predicate == AT_LEAST)):
            if _along(graph, makers, keys, -1) and _along(graph, makers, queries, -2):
                return {LATER if at_most == holds else EARLIER}
        return set()
    if predicate == ALL_HOLD:
        return {hidden for v in op.inputs if holds for hidden in _hidden(graph, makers, v, True)}
    if predicate == FILLS:  # fills scores where the second operand is true
        return _hidden(graph, makers, op.inputs[0], holds) | _hidden(graph, makers, op.inputs[1], not holds)
    if predicate == LOWER:
        return {LATER} if holds else {EARLIER}
    return _hidden(graph, makers, op.inputs[0], holds != (predicate == NOT)) if len(op.inputs) == 1 else set()


def _along(graph: Graph, makers: Mapping[str, Operator], value: str, dim: int) -> bool:
    """Return whether a value is positions along one of the last two dimensions."""
    shape = graph.tensors[value].shape
    other = -3 - dim
    alone = len(shape) >= -dim and shape[dim] > 1 and (len(shape) < -other or shape[other] == 1)
    return alone and _counts(makers, value)


def _counts(makers: Mapping[str, Operator], value: str) -> bool:
    """Return whether a value is computed from consecutive numbers only."""
    op = makers.get(value)
    return op is not None and (record_of(op).tells == COUNTS or (bool(op.inputs) and all(_counts(makers, v) for v in op.inputs)))
