"""Records of torch's operators: the record and the factor rule of a call, and the inputs through which partial sums pass.

To add an operator, add its record to its family (`pointwise`, `products`, ...); nothing else names it. An operator without a rule is
replicated and reported by name; it is never sharded by a guess.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from functools import cache

from shardwise.ops import (
    attention,
    creation,
    experts,
    lookups,
    losses,
    norms,
    pointwise,
    products,
    recurrent,
    reductions,
    transforms,
    views,
    windows,
)
from shardwise.ops.operator import Arg, Operator, Ref, Tensor
from shardwise.ops.pointwise import elementwise_rule_of_shapes
from shardwise.ops.record import Op, RuleOfTensors, Shape
from shardwise.ops.rule import BLOCKED, HALO, Labels, Rule, parse, restrict_rule
from shardwise.ops.sliding_window import Window
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, Linearity, LoweringKind, MatmulKind
from shardwise.plan.ir.placement import D, P, Placement, R, is_shard

__all__ = [
    "BLOCKED", "RECORDS", "Labels", "Op", "Rule", "elementwise_rule_of_shapes", "is_cheap_to_recompute", "is_elementwise", "is_identity",
    "is_random", "is_sum", "jointly_linear_in", "parse", "partial_placements", "reads_partial", "record_of", "record_of_target", "rule_of",
    "separately_linear_in", "windows_of", "writes_in_place",
]  # fmt: skip

FAMILIES = (attention, experts, lookups, losses, creation, norms, pointwise, products, recurrent, reductions, transforms, views, windows)
NO_RECORD = Op("")


def _build_records() -> dict[str, Op]:
    by_name: dict[str, Op] = {}
    for op in (op for family in FAMILIES for op in family.OPS):
        for key in (name if "." in name else f"aten.{name}" for name in op.names.split()):
            if key in by_name:
                raise ValueError(f"{key} has two records")
            by_name[key] = op
    return by_name


RECORDS = _build_records()  # by namespace and name, "aten.linear"


@cache
def record_of_target(target: str) -> Op:
    """Return the record of the target "aten.linear.default"; an empty one for third-party operators."""
    return RECORDS.get(".".join(target.split(".")[:2]), NO_RECORD)


def record_of(op: Operator) -> Op:
    """Return the record of an operator call."""
    return record_of_target(op.target)


def autocast_policy(op: Operator, tensors: Mapping[str, Tensor]) -> AutocastPolicy:
    """Return what autocast does with an operator call."""
    policy = record_of(op).autocast
    return policy if isinstance(policy, AutocastPolicy) else policy(op, tensors)


def rule_of(op: Operator, tensors: Mapping[str, Tensor]) -> Rule | None:
    """Return the factor rule of an operator at its shapes; None where it has none, or one that does not cover each of its tensors.

    A tensor may take the place of a number: where a slice begins, where to split.
    """
    record = record_of(op)
    rule = op.function.rule if op.function is not None else _rule_of_record(op, record, tensors)
    if rule is not None and HALO in rule.kernels.values():
        # A dimension with a single window or a single entry cannot be sharded.
        read, written = ({x for row in rows for x in row or ()} for rows in (rule.inputs, rule.outputs))
        slides = read & written & set(windows_of(op, tensors))
        rule = restrict_rule(rule, {x for x in rule.labels if rule.kernels.get(x) != HALO or x in slides})
    covers_all = rule is not None and len(rule.inputs) == len(op.inputs) and len(rule.outputs) == len(op.outputs)
    return rule if covers_all else None


def _rule_of_record(op: Operator, record: Op, tensors: Mapping[str, Tensor]) -> Rule | None:
    rule = record.rule
    if rule is None:
        return None
    if isinstance(rule, RuleOfTensors):
        return rule.make(op, tensors)
    ins, outs = ([tensors[v].shape for v in values] for values in (op.inputs, op.outputs))
    if callable(rule):
        return rule(op, ins, outs)
    for text in (rule,) if isinstance(rule, str) else rule:
        parsed = parse(text, _argument_shapes(op, text, tensors), outs)
        if parsed is not None:
            return parsed if record.adjust is None else record.adjust(op, parsed, ins)
    return None


def _argument_shapes(op: Operator, text: str, tensors: Mapping[str, Tensor]) -> list[Shape | None]:
    """Return shapes of the arguments that a line of notation describes; None for an omitted one or a number."""
    shapes: list[Shape | None] = []
    kwargs = dict(op.kwargs)
    entries = text.partition("->")[0].count(",") + 1
    extra: list[Arg] = [kwargs[k] for k in ("attn_mask", "weight", "bias", "offs") if k in kwargs]
    for position in range(entries):
        arg: Arg = op.args[position] if position < len(op.args) else extra.pop(0) if extra else None
        shapes.append(tensors[arg.value].shape if isinstance(arg, Ref) else None)
    return shapes


def windows_of(op: Operator, tensors: Mapping[str, Tensor]) -> Mapping[str, Window]:
    """Return, by label, the window along it, where a shard of the input suffices to compute a shard of the output."""
    slides = record_of(op).windows
    return {} if slides is None or op.kwargs else slides.windows_by_label(op, tensors)  # windows read their arguments by position


def is_elementwise(op: Operator) -> bool:
    """Return whether each output element depends only on the input elements at its own position."""
    return record_of(op).rule in pointwise.ELEMENTWISE_RULES


def is_random(op: Operator) -> bool:
    """Return whether an operator draws random numbers."""
    if op.function is not None:
        return op.function.is_random
    record = record_of(op)
    if record is NO_RECORD:
        return creation.is_random_by_name(op.target.split(".")[1])
    is_active = record.draw.is_active
    return is_active(op) if callable(is_active) else is_active


_CHEAP_KINDS = (CostKind.ELEMENTWISE, CostKind.ACTIVATION, CostKind.NORM, CostKind.SOFTMAX, CostKind.CREATION, CostKind.VIEW)


def is_cheap_to_recompute(record: Op) -> bool:
    """Return whether running an operator again costs about as much as reading and writing its tensors: no product, look-up, loss or sliding
    window, nothing that writes statistics or draws other numbers than dropout's, and no operator without a record."""
    is_computed = record.product.kind == MatmulKind.NONE and record.product.flops is None and record.recurrence is None
    has_state = record.statistics.positions is not None or (bool(record.draw.is_active) and record.lowering != LoweringKind.DROPOUT)
    is_local = record.windows is None and not record.reduction.is_loss and not record.expert_stage
    return bool(record.names) and record.kind in _CHEAP_KINDS and is_computed and is_local and not has_state


def is_identity(op: Operator) -> bool:
    """Return whether a call returns its input unchanged: dropout that drops nothing."""
    tests_identity = record_of(op).draw.is_identity
    return tests_identity is not None and tests_identity(op)


def writes_in_place(op: Operator) -> bool:
    """Return whether an operator writes its first argument (`add_`)."""
    name = op.target.split(".")[1]
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__") and bool(op.args) and isinstance(op.args[0], Ref)


def is_sum(op: Operator) -> bool:
    """Return whether an operator adds its inputs, numbers too."""
    return record_of(op).linear == Linearity.SUM


def jointly_linear_in(op: Operator, zeros: Container[str] = frozenset()) -> list[str] | None:
    """Return the inputs in which an operator is jointly linear; None if there are none. `zeros`: values that are zero."""
    linear = record_of(op).linear
    values: tuple[str, ...] | None = None
    if callable(linear):
        values = linear(op, zeros)
    elif linear == Linearity.JOINT or (linear == Linearity.SUM and len(op.inputs) == 2):
        values = op.inputs
    return None if values is None else [v for v in values if v not in zeros]


def separately_linear_in(op: Operator) -> tuple[int, ...]:
    """Return the indices of the tensors in each of which an operator is linear with the others fixed: factors, a numerator.

    >>> separately_linear_in(Operator("d", "aten.div.Tensor", (Ref("a"), Ref("b")), (), ("d",), "d"))
    (0,)
    """
    linear = record_of(op).linear
    if linear == Linearity.MULTILINEAR:
        return tuple(range(len(op.inputs)))
    if linear == Linearity.NUMERATOR and "rounding_mode" not in dict(op.kwargs):
        return (0,) if op.args and isinstance(op.args[0], Ref) else ()
    return ()


def partial_placements(op: Operator, grads: Container[str]) -> list[tuple[Placement, ...]]:
    """Return input placements with which an operator maps partial sums to partial sums; `grads`: values that have a gradient."""
    jointly_linear = jointly_linear_in(op)
    if jointly_linear:
        return [tuple(P if v in jointly_linear else R for v in op.inputs)]
    fixed = [D if v in grads else R for v in op.inputs]
    return [(*fixed[:i], P, *fixed[i + 1 :]) for i in separately_linear_in(op)]


def reads_partial(needed: Sequence[Placement | None], available: Sequence[Sequence[Placement]]) -> bool:
    """Return whether these inputs follow from the available placements: a partial sum, and no shards."""
    return any(need is P and P in forms for need, forms in zip(needed, available, strict=True)) and not any(
        is_shard(f[0]) for f in available
    )
