"""Losses over elements, rows and classes, each reduced to a mean, to a sum, or not."""

from __future__ import annotations

from collections.abc import Mapping, Set

from shardwise.ops.operator import Operator, Ref, Tensor
from shardwise.ops.pointwise import elementwise_rule_of_shapes
from shardwise.ops.record import SAVES_INTEGERS, Backward, Op, RuleOfShapes, Shape
from shardwise.ops.rule import BLOCKED, Rule, broadcast_labels, shardable_labels
from shardwise.ops.saved_tensors import Saved, integer_inputs
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, LoweringKind, Reduction


def _reduction_of(op: Operator, position: int) -> object:
    """Return the reduction of a loss: 0 none, 1 mean, 2 sum."""
    return op.args[position] if len(op.args) > position else dict(op.kwargs).get("reduction", 1)


def _element_loss_rule(position: int) -> RuleOfShapes:
    """Return the rule of an elementwise loss: mean, sum or none over all elements."""

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        reduction = _reduction_of(op, position)
        if outs[0] or reduction == 0:
            return elementwise_rule_of_shapes(ins, outs)
        full = max(ins, key=len)
        labels = shardable_labels(full)
        rows = tuple(broadcast_labels(labels, full, s) for s in ins)
        return Rule(rows, ((),), {x: "average" for x in labels if x} if reduction == 1 else {})

    return rule


def _row_loss_rule(position: int, num_rows: int = 2) -> RuleOfShapes:
    """Return the rule of a loss of rows (pairs, triplets, margins between classes): one number per row, and their mean or sum. `num_rows`:
    number of leading tensors with one entry per row; class weights come after them."""

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        out_labels, rows = _reduction_of(op, position), ins[:num_rows]
        if len(ins[0]) != 2 or any(s[0] != ins[0][0] for s in rows if s) or any(not s for s in rows):
            return None
        label = "n" if ins[0][0] > 1 else BLOCKED
        labels = tuple((label, *(BLOCKED,) * (len(s) - 1)) if i < len(rows) else (BLOCKED,) * len(s) for i, s in enumerate(ins))
        return Rule(labels, ((label,) if out_labels == 0 else (),), {"n": "average"} if out_labels == 1 and label else {})

    return rule


def _nll_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of negative log-likelihood (classes are not sharded): the mean without class weights, the sum, or none."""
    reduction = _reduction_of(op, 3)
    if len(ins[0]) < 2 or len(ins[1]) != len(ins[0]) - 1 or (reduction == 1 and len(ins) != 2):
        return None
    rows = tuple(f"n{i}" if size > 1 else BLOCKED for i, size in enumerate(ins[1]))
    weights = ((BLOCKED,),) if len(ins) > 2 else ()
    kernels = {x: "average" for x in rows if x} if reduction == 1 else {} if reduction == 0 else {x: "summands" for x in rows if x}
    return Rule(((rows[0], BLOCKED, *rows[1:]), rows, *weights), (rows if reduction == 0 else (),), kernels)


def _cross_entropy_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of cross-entropy: mean or sum over rows, with classes shardable unless weighted or smoothed; or no reduction.

    A target with a class dimension is probabilities; its mean is over all rows regardless of weights.
    """
    weight = op.args[2] if len(op.args) > 2 else None
    reduction = _reduction_of(op, 3)
    smoothing = op.args[5] if len(op.args) > 5 else dict(op.kwargs).get("label_smoothing", 0.0)
    weights = ((BLOCKED,),) if isinstance(weight, Ref) else ()
    if len(ins[0]) < 2:
        return None
    if ins[1] == ins[0]:
        rows = tuple(f"n{i}" if size > 1 else BLOCKED for i, size in enumerate((ins[0][0], *ins[0][2:])))
        both = (rows[0], BLOCKED, *rows[1:])
        return Rule((both, both, *weights), (rows if reduction == 0 else (),), {x: "average" for x in rows if x} if reduction == 1 else {})
    if len(ins[1]) != len(ins[0]) - 1:
        return None
    rows = tuple(f"n{i}" if size > 1 else BLOCKED for i, size in enumerate(ins[1]))
    blocks_classes = weight is not None or smoothing or reduction == 0 or len(ins[0]) > 2 or ins[0][1] == 1
    classes = BLOCKED if blocks_classes else "c"
    kernels = {"c": "vocabulary"} if classes else {}
    if reduction == 1:
        kernels.update({x: "average" for x in rows if x})
    return Rule(((rows[0], classes, *rows[1:]), rows, *weights), (rows if reduction == 0 else (),), kernels)


def _ctc_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of CTC losses of [time, sample, class] with targets [sample, position] and both lengths: sample by sample."""
    n = "n" if outs[0][0] > 1 else BLOCKED
    return Rule(((BLOCKED, n, BLOCKED), (n, BLOCKED), (n,), (n,)), ((n,),))


def _ctc_lengths_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of target lengths, each compared with the number present."""
    n = "n" if outs[0][0] > 1 else BLOCKED
    return Rule(((n,), (n,)), ((n,),))


def _saved_log_softmax(op: Operator, tensors: Mapping[str, Tensor], grads: Set[str]) -> Saved:
    """Return the targets, and the bytes of the log-softmax."""
    return tuple(dict.fromkeys(op.inputs))[1:2], float(tensors[op.inputs[0]].size_bytes)


def _loss_record(names: str, rule: RuleOfShapes, closed: tuple[int, ...] = ()) -> Op:
    return Op(names, rule, reduction=Reduction.LOSS, backward=Backward(non_differentiable_at=closed), autocast=AutocastPolicy.FLOAT32)


OPS = (
    _loss_record("mse_loss l1_loss smooth_l1_loss huber_loss kl_div", _element_loss_rule(2)),
    _loss_record("soft_margin_loss", _element_loss_rule(2), (1,)),
    _loss_record("binary_cross_entropy", _element_loss_rule(3), (2,)),
    _loss_record("binary_cross_entropy_with_logits", _element_loss_rule(4)),
    _loss_record("hinge_embedding_loss", _element_loss_rule(3)),
    _loss_record("margin_ranking_loss", _element_loss_rule(4)),
    _loss_record("poisson_nll_loss", _element_loss_rule(5)),
    _loss_record("triplet_margin_loss", _row_loss_rule(7, 3)),
    _loss_record("cosine_embedding_loss", _row_loss_rule(4, 3)),
    _loss_record("multi_margin_loss", _row_loss_rule(5), (4,)),
    _loss_record("multilabel_margin_loss", _row_loss_rule(2)),
    Op(
        "cross_entropy_loss", _cross_entropy_rule, reduction=Reduction.CLASS_LOSS, kind=CostKind.SOFTMAX,
        backward=Backward(_saved_log_softmax, non_differentiable_at=(2,), saves_log_softmax=True), lowering=LoweringKind.CROSS_ENTROPY,
        autocast=AutocastPolicy.FLOAT32,
    ),
    Op(
        "nll_loss nll_loss_nd", _nll_rule, reduction=Reduction.CLASS_LOSS, kind=CostKind.GATHER,
        backward=Backward(integer_inputs, non_differentiable_at=(2,)), lowering=LoweringKind.NLL, autocast=AutocastPolicy.FLOAT32,
    ),
    Op("nll_loss2d", reduction=Reduction.LOSS, backward=Backward(non_differentiable_at=(2,)), autocast=AutocastPolicy.FLOAT32),
    Op("nll_loss_forward", kind=CostKind.GATHER, backward=SAVES_INTEGERS),
    Op("ctc_loss", reduction=Reduction.LOSS, autocast=AutocastPolicy.FLOAT32),
    Op("shardwise.ctc_loss", _ctc_rule, reduction=Reduction.LOSS, autocast=AutocastPolicy.FLOAT32),
    Op("shardwise.ctc_lengths", _ctc_lengths_rule),
)  # fmt: skip
