"""Normalization layers: batch and instance norm with running statistics, group norm, layer norm, weight norm."""

from __future__ import annotations

from shardwise.ops.operator import Operator, Ref
from shardwise.ops.record import Backward, Op, RunningStatistics, Shape
from shardwise.ops.rule import BLOCKED, Rule, restrict_rule
from shardwise.ops.saved_tensors import input_and_statistics
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, LoweringKind


def _batch_norm_rule(op: Operator, rule: Rule, ins: list[Shape]) -> Rule:
    """Return the batch norm rule; in evaluation running statistics are constants."""
    return rule if len(op.args) > 5 and op.args[5] is True else Rule(rule.inputs, rule.outputs, {})


def _instance_norm_rule(op: Operator, rule: Rule, ins: list[Shape]) -> Rule:
    running = [a for a in op.args[3:5] if isinstance(a, Ref)]
    if running and len(op.args) > 5 and op.args[5] is True:
        return restrict_rule(rule, set())  # the running statistics average over all samples
    if running:  # running statistics: each channel of each sample is normalized separately
        return restrict_rule(Rule(rule.inputs, rule.outputs), {"n"})
    return restrict_rule(rule, {x for x in rule.labels if x != "c"}) if len(ins) > 1 else rule


def _layer_norm_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of norms over the trailing `normalized_shape`: these dimensions and the weights are not sharded."""
    over = op.args[1] if len(op.args) > 1 else ()
    if not isinstance(over, tuple):
        return None
    lead = len(ins[0]) - len(over)
    labels = tuple(f"b{i - lead}" if i < lead and n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels, *((BLOCKED,) * len(s) for s in ins[1:])), (labels,))


def _weight_norm_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of directions and lengths along `dim`: each slice has its own norm."""
    dim = int(op.args[2] if len(op.args) > 2 else 0) % len(ins[0])  # type: ignore[call-overload]
    if len(ins[1]) != len(ins[0]) or ins[1][dim] != ins[0][dim]:
        return None
    labels = tuple("d" if i == dim and n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels, labels), (labels,))


OPS = (
    Op(
        "batch_norm", "n+ c s+*, c, c, c, c -> n c s*", _batch_norm_rule, kind=CostKind.BATCH_NORM,
        statistics=RunningStatistics((3, 4, 5), over_samples=True), backward=Backward(input_and_statistics),
        lowering=LoweringKind.BATCH_NORM, autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op(
        "instance_norm", "n c s+*, c, c, c, c -> n c s*", _instance_norm_rule, kind=CostKind.BATCH_NORM,
        statistics=RunningStatistics((3, 4, 5)), backward=Backward(input_and_statistics, temporaries=1.0),
        lowering=LoweringKind.INSTANCE_NORM, autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional", kind=CostKind.BATCH_NORM,
        backward=Backward(input_and_statistics), autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op("cudnn_batch_norm", kind=CostKind.BATCH_NORM, backward=Backward(input_and_statistics)),
    Op(
        "group_norm", "n !c s+*, _, !c, !c -> n !c s*", kind=CostKind.NORM, backward=Backward(input_and_statistics, transpose_copies=1.0),
        lowering=LoweringKind.GROUP_NORM, autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op(
        "layer_norm", _layer_norm_rule, kind=CostKind.NORM, backward=Backward(input_and_statistics, transpose_copies=1.0),
        autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op(
        "rms_norm", _layer_norm_rule, kind=CostKind.NORM, backward=Backward(input_and_statistics, saves_normalized=True),
        autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op(
        "native_group_norm native_layer_norm", kind=CostKind.NORM, backward=Backward(input_and_statistics),
        autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op("_fused_rms_norm", kind=CostKind.NORM, backward=Backward(input_and_statistics)),
    Op("_weight_norm", _weight_norm_rule),
)  # fmt: skip
