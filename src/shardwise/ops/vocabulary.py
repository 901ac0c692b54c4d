"""Vocabulary of operator records: the values that their fields have."""

from __future__ import annotations

from enum import StrEnum


class CostKind(StrEnum):
    """Kind of an operator, on which its speed depends; profiles name measured rates by it."""

    LINEAR = "linear"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    RECURRENT = "recurrent"
    ELEMENTWISE = "elementwise"
    ACTIVATION = "activation"
    NORM = "norm"
    BATCH_NORM = "batch_norm"
    SOFTMAX = "softmax"
    GATHER = "gather"
    CREATION = "make"
    VIEW = "view"


class ViewKind(StrEnum):
    """How output elements relate to input elements."""

    NONE = ""
    RESHAPE = "reshape"  # another shape
    EXPAND = "expand"  # repeated without a copy
    REPEAT = "repeat"  # repeated by a copy
    SLICE = "slice"  # a part of the input
    ALIAS = "alias"  # the same view
    CONTIGUOUS = "contiguous"  # a copy in row-major order
    CAST = "cast"  # another dtype
    COPY = "copy"


class Linearity(StrEnum):
    """Tensors in which an operator is linear."""

    NONE = ""
    JOINT = "joint"  # all tensors jointly
    SUM = "sum"  # likewise; adds numbers, too
    MULTILINEAR = "multilinear"  # each tensor, with the others fixed
    NUMERATOR = "numerator"  # the first operand


class AutocastPolicy(StrEnum):
    """Dtypes of an operator under autocast."""

    NONE = ""
    LOW_PRECISION = "low_precision"  # operands are cast to bfloat16
    FLOAT32 = "float32"  # operands are cast to float32
    FIRST_OPERAND = "first_operand"  # the output has the dtype of the first operand
    PER_OPERAND = "per_operand"  # each output has the dtype of its operand
    LAST_STATE = "last_state"  # the output has the dtype of a recurrence's last state
    LOW_PRECISION_OUTPUT = "low_precision_output"  # the output is in bfloat16


class MatmulKind(StrEnum):
    """Operands of a matrix product."""

    NONE = ""
    LINEAR = "linear"  # activations and a weight [outputs, inputs]
    WEIGHT = "weight"  # activations and another weight
    BATCHED = "batched"
    GROUPED = "grouped"  # rows of each expert and its weight
    LOOKUP = "lookup"  # indices of rows of a weight


class GradientMemory(StrEnum):
    """Memory of an operand's gradient."""

    NONE = ""
    ALIAS = "alias"  # the output gradient's
    REDUCED = "reduced"  # likewise, and reduced where the operand was broadcast
    BROADCAST = "broadcast"  # as large as the output
    SCATTER_ADD = "scatter_add"
    SPECTRUM = "spectrum"  # a complex spectrum of a real operand
    PADDED_SPECTRUM = "padded_spectrum"  # the spectrum of a padded operand


class MaskPredicate(StrEnum):
    """Predicate of positions, of which attention masks are made."""

    NONE = ""
    ARANGE = "arange"  # the elements are consecutive numbers
    LESS = "less"  # first operand <= second, or <
    GREATER = "greater"  # first operand >= second, or >
    AND = "and"
    NOT = "not"
    MASKED_FILL = "masked_fill"  # fill where the second operand is true
    LOWER_TRIANGLE = "lower_triangle"


class Reduction(StrEnum):
    """How an operator reduces contracted labels."""

    NONE = ""
    SUM = "sum"  # sharding one leaves partial sums
    LOSS = "loss"  # likewise; the operator is a loss
    CLASS_LOSS = "class_loss"  # likewise; classes are in dimension 1, and the mean is over targets that count
    MAX = "max"
    MIN = "min"

    @property
    def is_sum(self) -> bool:
        return self in (Reduction.SUM, Reduction.LOSS, Reduction.CLASS_LOSS)

    @property
    def is_loss(self) -> bool:
        return self in (Reduction.LOSS, Reduction.CLASS_LOSS)


class LoweringKind(StrEnum):
    """Special lowering of an operator, see `shardwise.lower.operator_lowering.LOWERINGS`."""

    NONE = ""
    EXPERT_DISPATCH = "expert_dispatch"
    EXPERT_MATMUL = "expert_matmul"
    EXPERT_COMBINE = "expert_combine"
    DROPOUT = "dropout"
    ATTENTION = "attention"
    BATCH_NORM = "batch_norm"
    GROUP_NORM = "group_norm"
    INSTANCE_NORM = "instance_norm"
    GROUPED_CONVOLUTION = "grouped_convolution"
    CONTIGUOUS = "contiguous"
    COMPLEX_CLONE = "complex_clone"
    SLICE = "slice"
    HIDDEN_UNITS = "hidden_units"
    SCATTER = "scatter"
    CROSS_ENTROPY = "cross_entropy"
    NLL = "nll"
