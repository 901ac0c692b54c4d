"""What is known of the operators of torch, one record each. In: a call. Out: its record, its factor rule.

To add an operator, add its record to the family that it is of (`pointwise`, `products`, ...); nothing else names it. An operator without a
rule is replicated by whoever asks, and reported by name; it is never split by a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from weft.ops import (
    attention,
    experts,
    lookups,
    losses,
    made,
    norms,
    pointwise,
    products,
    recurrent,
    reductions,
    transforms,
    views,
    windows,
)
from weft.ops.operator import Arg, Operator, Ref, Tensor
from weft.ops.pointwise import of_elements
from weft.ops.record import ByTensors, Op, Shape
from weft.ops.rule import BLOCKED, HALO, Labels, Rule, only, parse
from weft.ops.sliding_window import Window

__all__ = [
    "BLOCKED", "RECORDS", "Labels", "Op", "Rule", "by_elements", "draws", "idle", "of_elements", "parse", "record_of", "record_of_target",
    "rule_of", "windows_of", "writes",
]  # fmt: skip

FAMILIES = (attention, experts, lookups, losses, made, norms, pointwise, products, recurrent, reductions, transforms, views, windows)
NO_RECORD = Op("")


def _records() -> dict[str, Op]:
    by_name: dict[str, Op] = {}
    for op in (op for family in FAMILIES for op in family.OPS):
        for key in (f"{op.namespace}.{name}" for name in op.names.split()):
            if key in by_name:
                raise ValueError(f"{key} has two records")
            by_name[key] = op
    return by_name


RECORDS = _records()  # by namespace and name, "aten.linear"


@cache
def record_of_target(target: str) -> Op:
    """The record of what "aten.linear.default" calls; one that says nothing, of operators of somebody else's."""
    return RECORDS.get(".".join(target.split(".")[:2]), NO_RECORD)


def record_of(op: Operator) -> Op:
    """The record of what is called."""
    return record_of_target(op.target)


def rule_of(op: Operator, tensors: Mapping[str, Tensor]) -> Rule | None:
    """The factor rule of one operator at its shapes; None where it has none, or one that does not speak of each of its tensors.

    A tensor may stand where most calls have a number: where a slice begins, where to split.
    """
    record = record_of(op)
    rule = op.function.rule if op.function is not None else _rule_of(op, record, tensors)
    if rule is not None and HALO in rule.kernels.values():
        # Of one window, or of windows over one entry, there is nothing to divide.
        read, written = ({x for row in rows for x in row or ()} for rows in (rule.inputs, rule.outputs))
        slides = read & written & set(windows_of(op, tensors))
        rule = only(rule, {x for x in rule.labels if rule.kernels.get(x) != HALO or x in slides})
    spoken = rule is not None and len(rule.inputs) == len(op.inputs) and len(rule.outputs) == len(op.outputs)
    return rule if spoken else None


def _rule_of(op: Operator, record: Op, tensors: Mapping[str, Tensor]) -> Rule | None:
    rule = record.rule
    if rule is None:
        return None
    if isinstance(rule, ByTensors):
        return rule.make(op, tensors)
    ins, outs = ([tensors[v].shape for v in values] for values in (op.inputs, op.outputs))
    if callable(rule):
        return rule(op, ins, outs)
    for text in (rule,) if isinstance(rule, str) else rule:
        parsed = parse(text, _given(op, text, tensors), outs)
        if parsed is not None:
            return parsed if record.adjust is None else record.adjust(op, parsed, ins)
    return None


def _given(op: Operator, text: str, tensors: Mapping[str, Tensor]) -> list[Shape | None]:
    """Shapes of the leading arguments that a line of notation speaks of; None for one that is absent or no tensor."""
    shapes: list[Shape | None] = []
    kwargs = dict(op.kwargs)
    entries = text.partition("->")[0].count(",") + 1
    extra: list[Arg] = [kwargs[k] for k in ("attn_mask", "weight", "bias", "offs") if k in kwargs]
    for position in range(entries):
        arg: Arg = op.args[position] if position < len(op.args) else extra.pop(0) if extra else None
        shapes.append(tensors[arg.value].shape if isinstance(arg, Ref) else None)
    return shapes


def windows_of(op: Operator, tensors: Mapping[str, Tensor]) -> Mapping[str, Window]:
    """By label, the window that slides along it, where a piece of the input is enough to tell a piece of the output."""
    slides = record_of(op).windows
    return {} if slides is None or op.kwargs else slides.of(op, tensors)  # what is given by name is read by position here


def by_elements(op: Operator) -> bool:
    """Whether each element of what it makes depends on the elements at its own place alone."""
    return record_of(op).rule in pointwise.BY_ELEMENTS


def draws(op: Operator) -> bool:
    """Whether an operator draws random numbers."""
    if op.function is not None:
        return op.function.draws
    record = record_of(op)
    if record is NO_RECORD:
        return made.draws_by_name(op.target.split(".")[1])
    return record.draws(op) if callable(record.draws) else record.draws


def idle(op: Operator) -> bool:
    """Whether a call hands back what it is given: dropout that drops nothing."""
    record = record_of(op)
    return record.idle is not None and record.idle(op)


def writes(op: Operator) -> bool:
    """Whether an operator writes its first argument (`add_`)."""
    name = op.target.split(".")[1]
    return name.endswith("_") and not name.startswith("_") and not name.endswith("__") and bool(op.args) and isinstance(op.args[0], Ref)
