"""Elementwise operators: each output element depends only on the input elements at its own (broadcast) position."""

from __future__ import annotations

from collections.abc import Container

from shardwise.ops.operator import Operator, Ref
from shardwise.ops.record import ALIASES_GRADIENT, SAVES_INTEGERS, Backward, Op, Output, Shape, View
from shardwise.ops.rule import Rule, broadcast_labels, shardable_labels
from shardwise.ops.saved_tensors import first_output, integer_inputs, product_operands, quotient_operands
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, GradientMemory, Linearity, LoweringKind, MaskPredicate, ViewKind


def elementwise_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule: dimensions pass through; broadcast dimensions of size 1 are replicated."""
    return elementwise_rule_of_shapes(ins, outs)


def elementwise_rule_of_shapes(ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule of any elementwise operator at these shapes."""
    out = shardable_labels(outs[0])
    return Rule(tuple(broadcast_labels(out, outs[0], shape) for shape in ins), tuple(out for _ in outs))


def _cast_like_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule of a cast to another tensor's dtype; that tensor's values are not read."""
    first = elementwise_rule_of_shapes(ins[:1], outs)
    return Rule((*first.inputs, *(None for _ in ins[1:])), first.outputs)


def _cast_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    return _cast_like_rule(op, ins, outs) if op.target == "aten.to.other" else elementwise_rule_of_shapes(ins, outs)


ELEMENTWISE_RULES = (elementwise_rule, _cast_rule, _cast_like_rule)  # these rules


def _where_linear_in(op: Operator, zeros: Container[str]) -> tuple[str, ...] | None:
    """Return the inputs in which `where` is linear: its alternatives, where each is a tensor or zero."""
    return op.inputs[1:] if op.inputs and all(isinstance(a, Ref) or a == 0 for a in op.args) else None


def _masked_fill_linear_in(op: Operator, zeros: Container[str]) -> tuple[str, ...] | None:
    """Return the input in which `masked_fill` with zeros is linear."""
    filled = op.args[2]
    return op.inputs[:1] if (filled.value in zeros if isinstance(filled, Ref) else filled == 0) else None


OPS = (
    Op(
        """
        __lshift__ __or__ __rshift__ __xor__ _conj _fused_adagrad _fused_adam _fused_adamw _fused_sgd acos acosh addcdiv addcmul
        angle asin asinh atan atanh bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor celu clamp clamp_max clamp_min
        clip complex copysign cosh deg2rad digamma elu_backward erfc erfinv fix float_power floor_divide fmax fmin fmod frac gelu_backward
        hardshrink hardsigmoid hardsigmoid_backward hardswish_backward hardtanh hardtanh_backward heaviside hypot i0 igamma igammac isclose
        isfinite isinf isnan ldexp leaky_relu leaky_relu_backward lerp lgamma lift log10 log2 logaddexp logaddexp2 logical_or
        logical_xor logit logit_backward mish_backward mvlgamma nan_to_num nextafter polygamma positive rad2deg relu6 remainder resolve_neg
        sgn sigmoid_backward sign silu_backward sinc sinh softplus_backward softshrink special_bessel_j0 special_bessel_j1 special_entr
        special_erfcx special_expit special_i0 special_i0e special_i1 special_i1e special_log_ndtr special_ndtr special_ndtri
        special_xlog1py special_xlogy special_zeta square square_ tan tanh_backward threshold threshold_backward trunc xlogy zero
        """,
        elementwise_rule,
    ),
    Op("__and__ bitwise_and logical_and", elementwise_rule, output=Output(mask=MaskPredicate.AND)),
    Op("bitwise_not logical_not", elementwise_rule, output=Output(mask=MaskPredicate.NOT), backward=SAVES_INTEGERS),
    Op("ceil conj copy fill floor resolve_conj round", elementwise_rule, backward=SAVES_INTEGERS),
    Op("eq ne not_equal", elementwise_rule, backward=SAVES_INTEGERS),
    Op("lt less le less_equal", elementwise_rule, output=Output(mask=MaskPredicate.LESS), backward=SAVES_INTEGERS),
    Op("gt greater ge greater_equal", elementwise_rule, output=Output(mask=MaskPredicate.GREATER), backward=SAVES_INTEGERS),
    Op("add sub subtract", elementwise_rule, linear=Linearity.SUM, backward=Backward(integer_inputs, GradientMemory.REDUCED)),
    Op("rsub", elementwise_rule, linear=Linearity.SUM, backward=SAVES_INTEGERS),
    Op("neg negative", elementwise_rule, linear=Linearity.JOINT, backward=SAVES_INTEGERS),
    Op("mul multiply", elementwise_rule, linear=Linearity.MULTILINEAR, backward=Backward(product_operands, GradientMemory.BROADCAST)),
    Op(
        "div divide true_divide", elementwise_rule, linear=Linearity.NUMERATOR,
        backward=Backward(quotient_operands, GradientMemory.BROADCAST),
    ),
    Op("maximum minimum", elementwise_rule, backward=Backward(gradient=GradientMemory.BROADCAST)),
    Op("where", elementwise_rule, linear=_where_linear_in, backward=Backward(integer_inputs, GradientMemory.BROADCAST)),
    Op(
        "masked_fill", elementwise_rule, linear=_masked_fill_linear_in, output=Output(mask=MaskPredicate.MASKED_FILL),
        backward=SAVES_INTEGERS, autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op("relu reciprocal", elementwise_rule, backward=Backward(first_output)),
    Op("exp sigmoid sqrt tanh", elementwise_rule, kind=CostKind.ACTIVATION, backward=Backward(first_output, conjugates_saved=True)),
    Op("exp2 expm1 rsqrt", elementwise_rule, kind=CostKind.ACTIVATION, backward=Backward(first_output)),
    Op("atan2 cos elu erf hardswish log log1p log_sigmoid mish selu silu sin softplus", elementwise_rule, kind=CostKind.ACTIVATION),
    Op("logsigmoid log_sigmoid_forward", kind=CostKind.ACTIVATION),
    Op("gelu", elementwise_rule, kind=CostKind.ACTIVATION, backward=Backward(transpose_copies=2.0)),
    Op("pow", elementwise_rule, kind=CostKind.ACTIVATION, backward=Backward(temporaries=2.0)),
    Op("abs absolute", elementwise_rule, backward=Backward(temporaries=1.0)),
    Op("prelu", ("n c s*, c -> n c s*", "n c s*, !c -> n c s*"), autocast=AutocastPolicy.LOW_PRECISION),
    Op("to", _cast_rule, linear=Linearity.JOINT, view=View(ViewKind.CAST), backward=Backward(integer_inputs, num_differentiable=1)),
    Op("_to_copy", elementwise_rule, linear=Linearity.JOINT, view=View(ViewKind.CAST), backward=SAVES_INTEGERS),
    Op("type_as", _cast_like_rule, backward=Backward(integer_inputs, num_differentiable=1)),
    Op(
        "contiguous", elementwise_rule, linear=Linearity.JOINT, view=View(ViewKind.CONTIGUOUS),
        backward=Backward(integer_inputs, GradientMemory.ALIAS),
    ),
    Op("clone", elementwise_rule, linear=Linearity.JOINT, view=View(ViewKind.COPY), backward=SAVES_INTEGERS),
    Op("lift_fresh_copy", elementwise_rule, kind=CostKind.CREATION, view=View(ViewKind.COPY), backward=SAVES_INTEGERS),
    Op("lift_fresh", view=View(ViewKind.ALIAS)),
    Op("alias", elementwise_rule, linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(ViewKind.ALIAS), backward=ALIASES_GRADIENT),
    Op(
        "detach", elementwise_rule, linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(ViewKind.ALIAS),
        backward=Backward(num_differentiable=0),
    ),
    Op("real imag", elementwise_rule, kind=CostKind.VIEW),
    Op("view_as_real", "b* -> b* !r", kind=CostKind.VIEW),
    Op("view_as_complex", "b* !r -> b*", backward=SAVES_INTEGERS, lowering=LoweringKind.COMPLEX_CLONE, autocast=AutocastPolicy.FLOAT32),
    Op("polar", elementwise_rule, autocast=AutocastPolicy.FLOAT32),
    Op("broadcast_tensors", elementwise_rule, kind=CostKind.VIEW, autocast=AutocastPolicy.PER_OPERAND),
)  # fmt: skip
