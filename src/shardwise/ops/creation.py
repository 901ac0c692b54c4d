"""Operators that create tensors from numbers or shapes, and random ones: factories, dropout, samplers."""

from __future__ import annotations

from shardwise.ops.operator import Operator
from shardwise.ops.pointwise import elementwise_rule
from shardwise.ops.record import SAVES_INTEGERS, Backward, Op, Output, RandomDraw, Shape, Tensors
from shardwise.ops.rule import BLOCKED, Rule
from shardwise.ops.saved_tensors import channel_mask, element_mask, integer_inputs, no_tensors
from shardwise.ops.vocabulary import CostKind, LoweringKind, MaskPredicate

# An operator without a record (third-party ones too) is taken as random if its name contains one of these.
_RANDOM_NAME_PARTS = (
    "dropout", "bernoulli", "rand", "normal", "multinomial", "uniform", "rrelu", "exponential", "cauchy", "geometric", "poisson",
    "binomial",
)  # fmt: skip


def is_random_by_name(name: str) -> bool:
    """Return whether an operator of this name draws random numbers."""
    return not name.endswith("_loss") and any(word in name for word in _RANDOM_NAME_PARTS)


def replicated_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return a rule that reads no values and shards no output dimension."""
    return Rule(tuple(None for _ in ins), tuple((BLOCKED,) * len(s) for s in outs))


def _is_inactive_dropout(op: Operator) -> bool:
    """Return whether dropout drops nothing."""
    probability = op.args[1] if len(op.args) > 1 else 0.5
    training = op.args[2] if len(op.args) > 2 else True
    return not (bool(training) and isinstance(probability, int | float) and probability > 0)


def _is_active_dropout(op: Operator) -> bool:
    """Return whether dropout draws."""
    return not (len(op.args) > 2 and (op.args[1] == 0 or op.args[2] is False))


def _draws_dropout_mask(op: Operator) -> bool:
    """Return whether dropout draws: not where it drops all elements either."""
    return _is_active_dropout(op) and op.args[1] != 1


def _channel_shape(op: Operator, tensors: Tensors) -> Shape:
    """Return the shape of a draw of one number per channel."""
    out = tensors[op.outputs[0]].shape
    return (*out[:2], *(1,) * (len(out) - 2))


def _multinomial_shape(op: Operator, tensors: Tensors) -> Shape:
    """Return the shape of a draw of one number per sampled index, or, without replacement, per candidate."""
    with_replacement = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("replacement", False)
    return tensors[op.outputs[0] if with_replacement else op.inputs[0]].shape


READS_SHAPE = Backward(integer_inputs, num_differentiable=0)

OPS = (
    Op("arange", replicated_rule, kind=CostKind.CREATION, output=Output(mask=MaskPredicate.ARANGE), backward=SAVES_INTEGERS),
    Op("eye linspace", replicated_rule, kind=CostKind.CREATION, backward=SAVES_INTEGERS),
    Op("tril_indices triu_indices hann_window", replicated_rule),
    Op(
        "zeros", replicated_rule, kind=CostKind.CREATION, output=Output(shape_at=0, fill=0.0, sample_invariant=True),
        backward=SAVES_INTEGERS,
    ),
    Op("ones empty", replicated_rule, kind=CostKind.CREATION, output=Output(shape_at=0, sample_invariant=True), backward=SAVES_INTEGERS),
    Op(
        "full", replicated_rule, kind=CostKind.CREATION, output=Output(shape_at=0, fill_at=1, sample_invariant=True),
        backward=SAVES_INTEGERS,
    ),
    Op("scalar_tensor", replicated_rule, kind=CostKind.CREATION, output=Output(fill_at=0, sample_invariant=True), backward=SAVES_INTEGERS),
    Op(
        "new_zeros", replicated_rule, kind=CostKind.CREATION,
        output=Output(shape_at=1, fill=0.0, reads_values=False, sample_invariant=True), backward=READS_SHAPE,
    ),
    Op(
        "new_ones", replicated_rule, kind=CostKind.CREATION, output=Output(shape_at=1, reads_values=False, sample_invariant=True),
        backward=READS_SHAPE,
    ),
    Op(
        "new_full", replicated_rule, kind=CostKind.CREATION,
        output=Output(shape_at=1, fill_at=2, reads_values=False, sample_invariant=True), backward=READS_SHAPE,
    ),
    Op(
        "new_empty", replicated_rule, output=Output(shape_at=1, reads_values=False, sample_invariant=True),
        backward=Backward(num_differentiable=0),
    ),
    Op("new_empty_strided", output=Output(reads_values=False), backward=Backward(num_differentiable=0)),
    Op("zeros_like", elementwise_rule, kind=CostKind.CREATION, output=Output(fill=0.0, reads_values=False), backward=READS_SHAPE),
    Op("ones_like empty_like", elementwise_rule, kind=CostKind.CREATION, output=Output(reads_values=False), backward=READS_SHAPE),
    Op("full_like", elementwise_rule, kind=CostKind.CREATION, output=Output(fill_at=1, reads_values=False), backward=READS_SHAPE),
    Op("tril", "b* !i !j -> b* !i !j", kind=CostKind.CREATION, output=Output(mask=MaskPredicate.LOWER_TRIANGLE), backward=SAVES_INTEGERS),
    Op("triu", "b* !i !j -> b* !i !j", kind=CostKind.CREATION, backward=SAVES_INTEGERS),
    Op("one_hot", "b* -> b* !c", kind=CostKind.CREATION, backward=SAVES_INTEGERS),
    Op("rand randn", replicated_rule, output=Output(shape_at=0, sample_invariant=True), draw=RandomDraw(True)),
    Op("randint", replicated_rule, output=Output(sample_invariant=True), draw=RandomDraw(True)),
    Op("randperm", replicated_rule, draw=RandomDraw(True)),
    Op(
        "rand_like randn_like randint_like", elementwise_rule, output=Output(reads_values=False), draw=RandomDraw(True),
        backward=Backward(num_differentiable=0),
    ),
    Op("uniform normal_functional bernoulli exponential", elementwise_rule, draw=RandomDraw(True)),
    Op("multinomial", draw=RandomDraw(True, _multinomial_shape)),
    Op(
        "dropout", elementwise_rule, draw=RandomDraw(_draws_dropout_mask, is_identity=_is_inactive_dropout), backward=Backward(no_tensors),
        lowering=LoweringKind.DROPOUT,
    ),
    Op(
        "alpha_dropout", elementwise_rule, draw=RandomDraw(_is_active_dropout, is_identity=_is_inactive_dropout),
        backward=Backward(element_mask),
    ),
    Op(
        "feature_dropout", "n c !s* -> n c !s*", draw=RandomDraw(_is_active_dropout, _channel_shape, is_identity=_is_inactive_dropout),
        backward=Backward(channel_mask),
    ),
    Op("native_dropout", "b* -> b*, b*", draw=RandomDraw(_is_active_dropout), backward=Backward(no_tensors)),
    Op("feature_alpha_dropout", draw=RandomDraw(_is_active_dropout), backward=Backward(channel_mask)),
)  # fmt: skip
