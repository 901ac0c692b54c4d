"""Which attention hides by its mask what comes later. In: a graph, an attention of it. Out: whether queries see keys up to their own place.

Read from how the mask is made: a comparison of positions of keys with those of queries, joined with whatever else hides keys (padding).
A mask that hides what came before as well (a window) is none. Ranks take positions in an order by which such attention is as much work for
each; nothing else follows from it, so that a mask that is not seen to be one costs time alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from weft.model.graph import Graph, Operator
from weft.ops import record_of
from weft.ops.attention import is_causal, mask_of
from weft.ops.record import ALL_HOLD, AT_LEAST, AT_MOST, COUNTS, FILLS, LOWER, NOT

LATER, EARLIER = "later", "earlier"


def hides_later(graph: Graph, makers: Mapping[str, Operator], op: Operator) -> bool:
    """Whether attention is causal, by itself or by its mask. `makers`: by value what makes it."""
    mask = mask_of(op)
    return is_causal(op) or (mask is not None and _hidden(graph, makers, mask, True) == {LATER})


def _hidden(graph: Graph, makers: Mapping[str, Operator], value: str, holds: bool) -> set[str]:
    """Which keys a mask [..., queries, keys] hides for their place, where what it says `holds` of those that are seen."""
    op = makers.get(value)
    if op is None or not op.inputs:
        return set()
    how = record_of(op).tells
    if how in (AT_MOST, AT_LEAST):
        first, second = op.inputs[0], op.inputs[-1]
        for keys, queries, at_most in ((first, second, how == AT_MOST), (second, first, how == AT_LEAST)):
            if _along(graph, makers, keys, -1) and _along(graph, makers, queries, -2):
                return {LATER if at_most == holds else EARLIER}
        return set()
    if how == ALL_HOLD:
        return {one for v in op.inputs if holds for one in _hidden(graph, makers, v, True)}
    if how == FILLS:  # a number is added to the scores where the second holds
        return _hidden(graph, makers, op.inputs[0], holds) | _hidden(graph, makers, op.inputs[1], not holds)
    if how == LOWER:
        return {LATER} if holds else {EARLIER}
    return _hidden(graph, makers, op.inputs[0], holds != (how == NOT)) if len(op.inputs) == 1 else set()


def _along(graph: Graph, makers: Mapping[str, Operator], value: str, dim: int) -> bool:
    """Whether a value is positions along a dimension of the last two."""
    shape = graph.tensors[value].shape
    other = -3 - dim
    alone = len(shape) >= -dim and shape[dim] > 1 and (len(shape) < -other or shape[other] == 1)
    return alone and _counts(makers, value)


def _counts(makers: Mapping[str, Operator], value: str) -> bool:
    """Whether a value is made of numbers in order, and of nothing else."""
    op = makers.get(value)
    return op is not None and (record_of(op).tells == COUNTS or (bool(op.inputs) and all(_counts(makers, v) for v in op.inputs)))
