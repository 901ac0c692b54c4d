"""Detection of causal attention masks: whether queries attend to keys up to their own position only.

Derived from how the mask is computed: a comparison of key positions with query positions, combined with any other mask (padding). A mask
that also hides earlier keys (a window) is not causal. Ranks may then balance causal attention by zigzag position order; nothing else
depends on it, so an undetected mask costs time only.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.model.graph import Graph, Operator
from shardwise.ops import record_of
from shardwise.ops.attention import attention_mask_of, is_causal
from shardwise.ops.record import ALL_HOLD, AT_LEAST, AT_MOST, COUNTS, FILLS, LOWER, NOT

LATER, EARLIER = "later", "earlier"


def is_causally_masked(graph: Graph, producers: Mapping[str, Operator], op: Operator) -> bool:
    """Return whether attention is causal, by its flag or by its mask. `makers`: by value, its producer."""
    mask = attention_mask_of(op)
    return is_causal(op) or (mask is not None and _hidden_keys(graph, producers, mask, True) == {LATER})


def _hidden_keys(graph: Graph, producers: Mapping[str, Operator], value: str, holds: bool) -> set[str]:
    """Return which keys a mask [..., queries, keys] hides by position (`LATER`, `EARLIER`); `holds`: the value of the mask at visible
    keys."""
    op = producers.get(value)
    if op is None or not op.inputs:
        return set()
    predicate = record_of(op).mask_predicate
    if predicate in (AT_MOST, AT_LEAST):
        first, second = op.inputs[0], op.inputs[-1]
        for keys, queries, at_most in ((first, second, predicate == AT_MOST), (second, first, predicate == AT_LEAST)):
            if _is_positions_along(graph, producers, keys, -1) and _is_positions_along(graph, producers, queries, -2):
                return {LATER if at_most == holds else EARLIER}
        return set()
    if predicate == ALL_HOLD:
        return {hidden for v in op.inputs if holds for hidden in _hidden_keys(graph, producers, v, True)}
    if predicate == FILLS:  # fills scores where the second operand is true
        return _hidden_keys(graph, producers, op.inputs[0], holds) | _hidden_keys(graph, producers, op.inputs[1], not holds)
    if predicate == LOWER:
        return {LATER} if holds else {EARLIER}
    return _hidden_keys(graph, producers, op.inputs[0], holds != (predicate == NOT)) if len(op.inputs) == 1 else set()


def _is_positions_along(graph: Graph, producers: Mapping[str, Operator], value: str, dim: int) -> bool:
    """Return whether a value is positions along one of the last two dimensions."""
    shape = graph.tensors[value].shape
    other = -3 - dim
    alone = len(shape) >= -dim and shape[dim] > 1 and (len(shape) < -other or shape[other] == 1)
    return alone and _is_counting(producers, value)


def _is_counting(producers: Mapping[str, Operator], value: str) -> bool:
    """Return whether a value is computed from consecutive numbers only."""
    op = producers.get(value)
    return op is not None and (
        record_of(op).mask_predicate == COUNTS or (bool(op.inputs) and all(_is_counting(producers, v) for v in op.inputs))
    )
