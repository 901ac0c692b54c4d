"""Attention as one operator: softmax(query @ key^T) @ value; its factor rule, FLOPs and saved tensors."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from math import prod

from shardwise.ops.operator import Operator, Ref, Tensor
from shardwise.ops.record import Backward, Op, Product, RandomDraw, Shape, Tensors
from shardwise.ops.rule import BLOCKED, QUERIES, Rule
from shardwise.ops.saved_tensors import Saved
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, LoweringKind


def _with_head_labels(op: Operator, rule: Rule, ins: list[Shape]) -> Rule:
    """Return the rule with a head label on all operands: grouped-query heads differ in number and are sharded into the same parts; a single
    head that all queries share is replicated."""
    rows = list(rule.inputs)
    for i, shape in enumerate(ins[:3]):
        if len(shape) >= 4:
            row = rows[i] or ()
            rows[i] = (*row[:-3], "h" if shape[-3] > 1 else BLOCKED, *row[-2:])
    out = rule.outputs[0]
    if len(out) >= 4 and out[-3]:
        out = (*out[:-3], "h", *out[-2:])
    return replace(rule, inputs=tuple(rows), outputs=(out,))


def _attention_flops(op: Operator, tensors: Tensors) -> float:
    """FLOPs: 2·L·S·(E + Ev) per head, in full also where it is causal."""
    query, key, value = (tensors[v].shape for v in op.inputs[:3])
    return 2.0 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_saved(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return inputs and output, and the bytes of one logarithm per row of scores."""
    query = tensors[op.inputs[0]]
    return (*tuple(dict.fromkeys(op.inputs))[:3], op.outputs[0]), 4.0 * query.size / query.shape[-1]


def _has_dropout(op: Operator) -> bool:
    return len(op.args) > 4 and isinstance(op.args[4], float) and op.args[4] > 0


def is_fused_attention(op: Operator) -> bool:
    """Return whether an operator is fused attention."""
    return op.target == "aten.scaled_dot_product_attention.default"


def has_score_dropout(op: Operator) -> bool:
    """Return whether an operator is attention with dropout."""
    drops = op.args[4] if len(op.args) > 4 else dict(op.kwargs).get("dropout_p", 0.0)
    return is_fused_attention(op) and isinstance(drops, int | float) and drops > 0


def attention_mask_of(op: Operator) -> str | None:
    """Return the value that is attention's mask; None where it has none."""
    mask = op.args[3] if len(op.args) > 3 else dict(op.kwargs).get("attn_mask")
    return mask.value if is_fused_attention(op) and isinstance(mask, Ref) else None


def is_causal(op: Operator) -> bool:
    """Return whether an operator is attention with `is_causal`, so that a fused kernel skips half of the scores."""
    causal = op.args[5] if len(op.args) > 5 else dict(op.kwargs).get("is_causal", False)
    return is_fused_attention(op) and causal is True


def heads_dim(rule: Rule | None) -> int | None:
    """Return the dimension of queries that is heads of attention; None where there is none, or one head."""
    if rule is None or QUERIES not in rule.kernels.values():
        return None
    row = rule.inputs[0] or ()
    at = next((i for i, label in enumerate(row) if rule.kernels.get(label) == QUERIES), 0)
    return at - 1 if at > 1 and row[at - 1] else None


def heads_label(rule: Rule | None) -> str:
    """Return the label of the heads of attention, in front of its queries; empty where there is none."""
    at = heads_dim(rule)
    return "" if rule is None or at is None else (rule.inputs[0] or ())[at]


def _score_shape(op: Operator, tensors: Tensors) -> Shape:
    """Return the shape of the dropout draw: one number per score."""
    return (*tensors[op.inputs[0]].shape[:-1], tensors[op.inputs[1]].shape[-2])


OPS = (
    Op(
        "scaled_dot_product_attention", "b* h s@ !d, b* h t& !d, b* h t& !e, b* h? s@? t& -> b* h s@ !e", _with_head_labels,
        kind=CostKind.ATTENTION, product=Product(_attention_flops), draw=RandomDraw(_has_dropout, _score_shape),
        backward=Backward(_attention_saved), lowering=LoweringKind.ATTENTION, autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "_scaled_dot_product_attention_math _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu", kind=CostKind.ATTENTION, product=Product(_attention_flops),
        backward=Backward(_attention_saved),
    ),
)  # fmt: skip
