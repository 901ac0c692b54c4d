"""Operators that create tensors from numbers or shapes, and random ones: factories, dropout, samplers."""

from __future__ import annotations

from weft.ops.keeps import mask, mask_of_channels, nothing, others
from weft.ops.operator import Operator
from weft.ops.pointwise import elements
from weft.ops.record import COUNTS, LOWER, Op, Shape, Tensors
from weft.ops.rule import BLOCKED, Rule

# An operator without a record (third-party ones too) is taken as random if its name contains one of these.
_RANDOM = (
    "dropout", "bernoulli", "rand", "normal", "multinomial", "uniform", "rrelu", "exponential", "cauchy", "geometric", "poisson",
    "binomial",
)  # fmt: skip


def draws_by_name(name: str) -> bool:
    """Return whether an operator of this name draws random numbers."""
    return not name.endswith("_loss") and any(word in name for word in _RANDOM)


def unsharded(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return a rule that reads no values and shards no output dimension."""
    return Rule(tuple(None for _ in ins), tuple((BLOCKED,) * len(s) for s in outs))


def _keeps_all(op: Operator) -> bool:
    """Return whether dropout drops nothing."""
    probability = op.args[1] if len(op.args) > 1 else 0.5
    training = op.args[2] if len(op.args) > 2 else True
    return not (bool(training) and isinstance(probability, int | float) and probability > 0)


def _drops(op: Operator) -> bool:
    """Return whether dropout draws."""
    return not (len(op.args) > 2 and (op.args[1] == 0 or op.args[2] is False))


def _drops_some(op: Operator) -> bool:
    """Return whether dropout draws: not where it drops all elements either."""
    return _drops(op) and op.args[1] != 1


def _channels(op: Operator, tensors: Tensors) -> Shape:
    """Return the shape of a draw of one number per channel."""
    out = tensors[op.outputs[0]].shape
    return (*out[:2], *(1,) * (len(out) - 2))


def _chances(op: Operator, tensors: Tensors) -> Shape:
    """Return the shape of a draw of one number per sampled index, or, without replacement, per candidate."""
    with_replacement = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("replacement", False)
    return tensors[op.outputs[0] if with_replacement else op.inputs[0]].shape


OPS = (
    Op("arange", unsharded, kind="make", keeps=others, tells=COUNTS),
    Op("eye linspace", unsharded, kind="make", keeps=others),
    Op("tril_indices triu_indices hann_window", unsharded),
    Op("zeros", unsharded, kind="make", keeps=others, sample_invariant=True, shape_at=0, fill=0.0),
    Op("ones empty", unsharded, kind="make", keeps=others, sample_invariant=True, shape_at=0),
    Op("full", unsharded, kind="make", keeps=others, sample_invariant=True, shape_at=0, fill_at=1),
    Op("scalar_tensor", unsharded, kind="make", keeps=others, sample_invariant=True, fill_at=0),
    Op("new_zeros", unsharded, kind="make", keeps=others, reads=False, learns=0, sample_invariant=True, shape_at=1, fill=0.0),
    Op("new_ones", unsharded, kind="make", keeps=others, reads=False, learns=0, sample_invariant=True, shape_at=1),
    Op("new_full", unsharded, kind="make", keeps=others, reads=False, learns=0, sample_invariant=True, shape_at=1, fill_at=2),
    Op("new_empty", unsharded, reads=False, learns=0, sample_invariant=True, shape_at=1),
    Op("new_empty_strided", reads=False, learns=0),
    Op("zeros_like", elements, kind="make", keeps=others, reads=False, learns=0, fill=0.0),
    Op("ones_like empty_like", elements, kind="make", keeps=others, reads=False, learns=0),
    Op("full_like", elements, kind="make", keeps=others, reads=False, learns=0, fill_at=1),
    Op("tril", "b* !i !j -> b* !i !j", kind="make", keeps=others, tells=LOWER),
    Op("triu", "b* !i !j -> b* !i !j", kind="make", keeps=others),
    Op("one_hot", "b* -> b* !c", kind="make", keeps=others),
    Op("rand randn", unsharded, draws=True, sample_invariant=True, shape_at=0),
    Op("randint", unsharded, draws=True, sample_invariant=True),
    Op("randperm", unsharded, draws=True),
    Op("rand_like randn_like randint_like", elements, draws=True, reads=False, learns=0),
    Op("uniform normal_functional bernoulli exponential", elements, draws=True),
    Op("multinomial", draws=True, drawn_shape=_chances),
    Op("dropout", elements, lowering="drop", draws=_drops_some, idle=_keeps_all, keeps=nothing),
    Op("alpha_dropout", elements, draws=_drops, idle=_keeps_all, keeps=mask),
    Op("feature_dropout", "n c !s* -> n c !s*", draws=_drops, drawn_shape=_channels, idle=_keeps_all, keeps=mask_of_channels),
    Op("native_dropout", "b* -> b*, b*", draws=_drops, keeps=nothing),
    Op("feature_alpha_dropout", draws=_drops, keeps=mask_of_channels),
)
