"""Elementwise operators: each output element depends only on the input elements at its own (broadcast) position."""

from __future__ import annotations

from collections.abc import Container

from weft.ops.keeps import operands, others, output, quotient
from weft.ops.operator import Operator, Ref
from weft.ops.record import ALL_HOLD, AT_LEAST, AT_MOST, FILLS, NOT, Op, Shape
from weft.ops.rule import BLOCKED, Rule


def elements(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule: dimensions pass through; broadcast dimensions of size 1 are replicated."""
    return of_elements(ins, outs)


def of_elements(ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule of any elementwise operator at these shapes."""
    rank = len(outs[0])
    out = tuple(f"d{i}" if n > 1 else BLOCKED for i, n in enumerate(outs[0]))
    rows = []
    for shape in ins:
        extra = rank - len(shape)
        rows.append(tuple(out[i + extra] if n == outs[0][i + extra] else BLOCKED for i, n in enumerate(shape)))
    return Rule(tuple(rows), tuple(out for _ in outs))


def _cast_like(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule of a cast to another tensor's dtype; that tensor's values are not read."""
    first = of_elements(ins[:1], outs)
    return Rule((*first.inputs, *(None for _ in ins[1:])), first.outputs)


def _cast(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    return _cast_like(op, ins, outs) if op.target == "aten.to.other" else of_elements(ins, outs)


BY_ELEMENTS = (elements, _cast, _cast_like)  # these rules


def _chosen(op: Operator, zeros: Container[str]) -> tuple[str, ...] | None:
    """Return the inputs in which `where` is linear: its alternatives, where each is a tensor or zero."""
    return op.inputs[1:] if op.inputs and all(isinstance(a, Ref) or a == 0 for a in op.args) else None


def _not_filled(op: Operator, zeros: Container[str]) -> tuple[str, ...] | None:
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
        elements,
    ),
    Op("__and__ bitwise_and logical_and", elements, tells=ALL_HOLD),
    Op("bitwise_not logical_not", elements, keeps=others, tells=NOT),
    Op("ceil conj copy fill floor resolve_conj round", elements, keeps=others),
    Op("eq ne not_equal", elements, keeps=others),
    Op("lt less le less_equal", elements, keeps=others, tells=AT_MOST),
    Op("gt greater ge greater_equal", elements, keeps=others, tells=AT_LEAST),
    Op("add sub subtract", elements, linear="sum", keeps=others, gradient="summed"),
    Op("rsub", elements, linear="sum", keeps=others),
    Op("neg negative", elements, linear="together", keeps=others),
    Op("mul multiply", elements, linear="each", keeps=operands, gradient="broadcast"),
    Op("div divide true_divide", elements, linear="numerator", keeps=quotient, gradient="broadcast"),
    Op("maximum minimum", elements, gradient="broadcast"),
    Op("where", elements, linear=_chosen, keeps=others, gradient="broadcast"),
    Op("masked_fill", elements, linear=_not_filled, keeps=others, tells=FILLS),
    Op("relu reciprocal", elements, keeps=output),
    Op("exp sigmoid sqrt tanh", elements, kind="activation", keeps=output, conjugates=True),
    Op("exp2 expm1 rsqrt", elements, kind="activation", keeps=output),
    Op("atan2 cos elu erf hardswish log log1p log_sigmoid mish selu silu sin softplus", elements, kind="activation"),
    Op("logsigmoid log_sigmoid_forward", kind="activation"),
    Op("gelu", elements, kind="activation", turned=2.0),
    Op("pow", elements, kind="activation", makes=2.0),
    Op("abs absolute", elements, makes=1.0),
    Op("prelu", ("n c s*, c -> n c s*", "n c s*, !c -> n c s*"), autocast="first"),
    Op("to", _cast, moves="cast", linear="together", learns=1, keeps=others),
    Op("_to_copy", elements, moves="cast", linear="together", keeps=others),
    Op("type_as", _cast_like, learns=1, keeps=others),
    Op("contiguous", elements, moves="rows", linear="together", keeps=others, gradient="same"),
    Op("clone", elements, moves="copy", linear="together", keeps=others),
    Op("lift_fresh_copy", elements, kind="make", moves="copy", keeps=others),
    Op("lift_fresh", moves="same"),
    Op("alias", elements, kind="view", moves="same", linear="together", gradient="same"),
    Op("detach", elements, kind="view", moves="same", linear="together", learns=0),
    Op("real imag", elements, kind="view"),
    Op("view_as_real", "b* -> b* !r", kind="view"),
    Op("view_as_complex", "b* !r -> b*", lowering="pairs", keeps=others, autocast="wider"),
    Op("polar", elements, autocast="wider"),
    Op("broadcast_tensors", elements, kind="view", autocast="apart"),
)
