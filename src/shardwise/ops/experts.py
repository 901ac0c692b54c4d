"""Mixture of experts (`shardwise.capture.experts`): dispatch of tokens to rows sorted by expert, grouped matrix products, combine.

A rank's samples are sorted on their own, so a rank's rows are no shard of all rows: such rows are neither gathered nor sliced
(`expert_rows`). Where rows are sharded over ranks with different experts, each rank has the rows of its own experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from math import comb

from shardwise.ops.operator import Operator, Tensor
from shardwise.ops.record import Backward, Op, Product, Shape, Tensors
from shardwise.ops.rule import BLOCKED, Labels, Rule
from shardwise.ops.saved_tensors import Saved, all_inputs
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, Linearity, LoweringKind, MatmulKind, Reduction
from shardwise.plan.ir.placement import even_shard_range

EXPERT = "e"  # label of the experts


def _shardable_label(name: str, size: int) -> str:
    return name if size > 1 else BLOCKED


def _dispatch_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    n, d = _shardable_label("n", ins[0][0]), _shardable_label("d", ins[0][1])
    return Rule(((n, d), (n, BLOCKED)), ((n, d), (n,), (n,)))


def _expert_matmul_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    m, i, e, o = (_shardable_label(x, size) for x, size in zip("mieo", (*ins[0], ins[2][0], outs[0][1]), strict=True))
    rows: list[Labels] = [(m, i), (m,), (e, i, o) if op.args[4] else (e, o, i)]
    return Rule((*rows, *([(e, o)] if len(ins) > 3 else [])), ((m, o),))


def _combine_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    n, d = _shardable_label("n", outs[0][0]), _shardable_label("d", outs[0][1])
    return Rule(((n, d), (n,), (n, BLOCKED)), ((n, d),))


def _expert_flops(op: Operator, tensors: Tensors) -> float:
    """FLOPs of each row times the matrix of its one expert."""
    return 2.0 * tensors[op.inputs[0]].size * tensors[op.outputs[0]].shape[1]


def _saved_routes(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the route of each row."""
    return op.outputs[2:], 0.0


def _saved_operands(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return rows and matrices, each if the other has a gradient, and the expert ids of the rows."""
    rows, ids, weight, *_ = op.inputs
    return (*((rows,) if weight in grads else ()), ids, *((weight,) if rows in grads else ())), 0.0


def num_experts(op: Operator, tensors: Tensors) -> int:
    """Return the number of experts of one of these operators."""
    return next((arg for arg in op.args if type(arg) is int), 0) or tensors[op.inputs[2]].shape[0]


def experts_and_top_k(op: Operator, tensors: Tensors) -> tuple[int, int]:
    """Return (experts, top k) of a dispatch or combine operator."""
    rows, tokens = sorted((tensors[v].shape[0] for v in (op.inputs[0], op.outputs[0])), reverse=True)
    return num_experts(op, tensors), rows // max(1, tokens)


def expected_ranks_per_token(experts: int, top: int, ranks: int) -> float:
    """Expected number of the `ranks` (with shards of the experts that differ by one at most) that a token is sent to, for `top` uniformly
    drawn experts.

    A rank with e of E experts has none of them with probability C(E - e, top) / C(E, top).

    >>> expected_ranks_per_token(8, 2, 4), expected_ranks_per_token(8, 1, 4), expected_ranks_per_token(4, 4, 2)
    (1.8571428571428572, 1.0, 2.0)
    """
    return sum(1 - comb(experts - even_shard_range(experts, ranks, rank)[1], top) / comb(experts, top) for rank in range(ranks))


OPS = (
    Op(
        "shardwise.to_experts", _dispatch_rule, linear=Linearity.NUMERATOR, kind=CostKind.GATHER,
        backward=Backward(_saved_routes, num_differentiable=1), lowering=LoweringKind.EXPERT_DISPATCH,
    ),
    Op(
        "shardwise.of_experts", _expert_matmul_rule, reduction=Reduction.SUM, kind=CostKind.LINEAR,
        product=Product(_expert_flops, MatmulKind.GROUPED), backward=Backward(_saved_operands), lowering=LoweringKind.EXPERT_MATMUL,
        autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "shardwise.from_experts", _combine_rule, linear=Linearity.NUMERATOR, kind=CostKind.GATHER, backward=Backward(all_inputs),
        lowering=LoweringKind.EXPERT_COMBINE,
    ),
)  # fmt: skip
