"""Reductions, sorts and scans along dimensions: which other dimensions can be sharded, and how a sharded one is reduced."""

from __future__ import annotations

from shardwise.ops.operator import Operator
from shardwise.ops.pointwise import elementwise_rule_of_shapes
from shardwise.ops.record import SAVES_INTEGERS, Backward, Op, Output, RuleOfShapes, RuleOfTensors, Shape, Tensors, View
from shardwise.ops.rule import BLOCKED, Rule, shardable_labels
from shardwise.ops.saved_tensors import (
    chosen_indices,
    first_output,
    inputs_after_first,
    inputs_and_output,
    integer_inputs,
    source_and_indices,
)
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, GradientMemory, Linearity, Reduction


def reduced_dims(op: Operator, position: int, rank: int) -> list[int] | None:
    """Return the reduced dimensions; None for all, empty for a scalar (which torch counts as one dimension)."""
    value = op.args[position] if len(op.args) > position else dict(op.kwargs).get("dim")
    if value is None or value == ():
        return None
    items = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
        return None
    return [int(i) % rank for i in items] if rank else []


def rule_along_dims(
    position: int = 1, defaults_to_last: bool = False, allows_other_ranks: bool = False, removes_dims: bool = False
) -> RuleOfShapes:
    """Return the rule of an operator along the dimensions in argument `position` (by default all, or the `last`).

    Every other dimension can be sharded if all tensors agree in its size. `loose`: tensors may have other ranks, and are then replicated.
    `reduces`: the dimensions may be missing from the output.
    """

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        dims = reduced_dims(op, position, len(ins[0])) or ([len(ins[0]) - 1] if defaults_to_last else None)
        if dims is None:
            return None
        is_reduced = removes_dims and len(outs[0]) != len(ins[0])
        shapes = [*ins, *([] if is_reduced else outs)]
        if any(len(s) != len(ins[0]) for s in shapes) and not allows_other_ranks:
            return None
        labels = tuple(
            f"d{i}" if i not in dims and n > 1 and all(len(s) != len(ins[0]) or s[i] == n for s in shapes) else BLOCKED
            for i, n in enumerate(ins[0])
        )
        rows = tuple(labels if len(s) == len(ins[0]) else (BLOCKED,) * len(s) for s in ins)
        if is_reduced:
            return Rule(rows, tuple(tuple(x for i, x in enumerate(labels) if i not in dims) for _ in outs))
        return Rule(rows, tuple(labels for _ in outs))

    return rule


def _reduction_rule(how: str = "", position: int = 1, is_elementwise_of_two: bool = True) -> RuleOfTensors:
    """Return the rule of a reduction: other dimensions pass through. `how` a sharded reduced dimension is combined: "sum", "mean",
    "extreme" (ranks compare their own; "whole": only where all dimensions are reduced); else it is not sharded. `several`: with two tensors
    it is elementwise."""

    def rule(op: Operator, tensors: Tensors) -> Rule | None:
        ins, outs = ([tensors[v].shape for v in values] for values in (op.inputs, op.outputs))
        if len(ins) > 1:  # max(x, y) of two tensors
            return elementwise_rule_of_shapes(ins, outs) if is_elementwise_of_two else None
        rank = len(ins[0])
        dims = reduced_dims(op, position, rank)
        if dims is None:
            dims = list(range(rank))
        keeps = len(outs[0]) == rank and rank > 0
        extreme = tensors[op.inputs[0]].is_float and (how == "extreme" or (how == "whole" and len(op.args) == 1))
        contracted = how in ("sum", "mean") or extreme
        labels = tuple(f"d{i}" if n > 1 and (i not in dims or contracted) else BLOCKED for i, n in enumerate(ins[0]))
        out = tuple(BLOCKED if i in dims else x for i, x in enumerate(labels) if keeps or i not in dims)
        if any(len(out) != len(o) for o in outs):
            return None
        kernel = "average" if how == "mean" else "extreme"
        kernels = {labels[i]: kernel for i in dims if labels[i]} if how == "mean" or extreme else {}
        return Rule((labels,), tuple(out for _ in outs), kernels)

    return RuleOfTensors(rule)


def _running_sum_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of a running sum: along a sharded dimension a rank adds the totals of earlier ranks."""
    dims = reduced_dims(op, 1, len(ins[0]))
    if dims is None:
        return None
    labels = shardable_labels(ins[0])
    return Rule((labels,), (labels,), {labels[i]: "running" for i in dims if labels[i]})


def _renorm_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `renorm`: each slice along `dim` has its own norm over all other dimensions."""
    dim = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim")
    if not isinstance(dim, int):
        return None
    labels = tuple("d" if i == dim % len(ins[0]) and n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels,), (labels,))


OPS = (
    Op(
        "sum", _reduction_rule("sum"), linear=Linearity.JOINT, reduction=Reduction.SUM,
        backward=Backward(integer_inputs, GradientMemory.ALIAS),
    ),
    Op("mean", _reduction_rule("mean"), linear=Linearity.JOINT, reduction=Reduction.SUM, backward=SAVES_INTEGERS),
    Op("nansum count_nonzero", _reduction_rule("sum"), reduction=Reduction.SUM),
    Op("amax", _reduction_rule("extreme"), reduction=Reduction.MAX, backward=Backward(inputs_and_output, temporaries=1.3)),
    Op("amin", _reduction_rule("extreme"), reduction=Reduction.MIN, backward=Backward(inputs_and_output, temporaries=1.3)),
    Op("max", _reduction_rule("whole"), reduction=Reduction.MAX, backward=Backward(chosen_indices)),
    Op("min", _reduction_rule("whole"), reduction=Reduction.MIN, backward=Backward(chosen_indices)),
    Op("median nanmedian mode", _reduction_rule(), backward=Backward(chosen_indices)),
    Op("any all argmax argmin var std var_mean std_mean nanmean aminmax", _reduction_rule()),
    Op("prod", _reduction_rule(), backward=Backward(inputs_and_output), autocast=AutocastPolicy.FLOAT32),
    Op("norm linalg_vector_norm", _reduction_rule(position=2), backward=Backward(inputs_and_output)),
    Op("quantile nanquantile", _reduction_rule(position=2, is_elementwise_of_two=False), autocast=AutocastPolicy.FLOAT32),
    Op("renorm", _renorm_rule),
    Op("msort", backward=Backward(chosen_indices)),
    Op("trapezoid", backward=SAVES_INTEGERS),
    Op("trace", autocast=AutocastPolicy.FLOAT32),
    Op(
        "softmax _softmax", rule_along_dims(), kind=CostKind.SOFTMAX, output=Output(is_probability=True),
        backward=Backward(first_output, transpose_copies=1.0),
    ),
    Op("log_softmax", rule_along_dims(), kind=CostKind.SOFTMAX, backward=Backward(first_output, transpose_copies=1.0)),
    Op("_log_softmax", rule_along_dims(), kind=CostKind.SOFTMAX, backward=Backward(first_output)),
    Op("_safe_softmax", kind=CostKind.SOFTMAX, output=Output(is_probability=True), backward=Backward(first_output)),
    Op("_softmax_backward_data _log_softmax_backward_data", rule_along_dims(2)),
    Op("logsumexp", rule_along_dims(removes_dims=True), kind=CostKind.SOFTMAX, backward=Backward(inputs_and_output)),
    Op("logcumsumexp", rule_along_dims(), backward=Backward(inputs_and_output)),
    Op("cumsum", _running_sum_rule, backward=Backward(integer_inputs, temporaries=2.0)),
    Op("cumprod", rule_along_dims(), backward=Backward(inputs_and_output, temporaries=3.2)),
    Op("cummax cummin", rule_along_dims(), backward=Backward(chosen_indices)),
    Op("flip", rule_along_dims(), linear=Linearity.JOINT, view=View(mixes_positions=True), backward=SAVES_INTEGERS),
    Op("roll", rule_along_dims(2), view=View(mixes_positions=True), backward=SAVES_INTEGERS),
    Op("diff", rule_along_dims(2), backward=SAVES_INTEGERS),
    Op("rot90 cross linalg_cross", rule_along_dims(2)),
    Op("topk", rule_along_dims(2, defaults_to_last=True), backward=Backward(chosen_indices)),
    Op("kthvalue", rule_along_dims(2, defaults_to_last=True, removes_dims=True), backward=Backward(chosen_indices)),
    Op("sort", rule_along_dims(defaults_to_last=True), backward=Backward(chosen_indices)),
    Op("argsort glu", rule_along_dims(defaults_to_last=True)),
    Op("fft_fftshift fft_ifftshift", rule_along_dims(), backward=SAVES_INTEGERS),
    Op("scatter scatter_add", rule_along_dims(), backward=SAVES_INTEGERS),
    Op("scatter_reduce", rule_along_dims()),
    Op("gather take_along_dim", rule_along_dims(), kind=CostKind.GATHER, backward=Backward(source_and_indices, GradientMemory.SCATTER_ADD)),
    Op("index_select", rule_along_dims(allows_other_ranks=True), kind=CostKind.GATHER, backward=SAVES_INTEGERS),
    Op("index_add", rule_along_dims(allows_other_ranks=True), backward=Backward(inputs_after_first)),
    Op("index_copy", rule_along_dims(allows_other_ranks=True)),
    Op("index_fill", rule_along_dims(allows_other_ranks=True), autocast=AutocastPolicy.FIRST_OPERAND),
)  # fmt: skip
