"""Records of torch's operators: the record and the factor rule of a call.

To add an operator, add its record to its family (`pointwise`, `products`, ...); nothing else names it. An operator without a rule is
replicated and reported by name; it is never sharded by a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
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

__all__ = [
    "BLOCKED",
    "RECORDS",
    "Labels",
    "Op",
    "Rule",
    "elementwise_rule_of_shapes",
    "is_elementwise",
    "is_identity",
    "is_random",
    "parse",
    "record_of",
    "record_of_target",
    "rule_of",
    "windows_of",
    "writes_in_place",
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


def is_identity(op: Operator) -> bool:
    """Return whether a call returns its input unchanged: dropout that drops nothing."""
    tests_identity = record_of(op).draw.is_identity
    return tests_identity is not None and tests_identity(op)


def writes_in_place(op: Operator) -> bool:
    """Return whether an operator writes its first argument (`add_`)."""
    name = op.target.split(".")[1]
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__") and bool(op.args) and isinstance(op.args[0], Ref)
