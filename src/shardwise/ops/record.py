"""The record of an operator: its sharding rule, memory format, backward behavior, randomness, cost and lowering.

Planner, cost model, lowering and checks read these fields and nothing else. A field that a record leaves out has the default that fits most
operators: no rule (the operator is replicated), elementwise, not random, inputs saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from shardwise.ops.operator import Operator, Tensor
from shardwise.ops.rule import FusedLabel, Rule
from shardwise.ops.saved_tensors import SavedRule, float_inputs
from shardwise.ops.sliding_window import Window
from shardwise.ops.vocabulary import (
    AutocastPolicy,
    CostKind,
    ExpertStage,
    Extreme,
    GradientMemory,
    Linearity,
    LoweringKind,
    MaskPredicate,
    MatmulKind,
    ViewKind,
)

Shape = tuple[int, ...]
RuleOfShapes = Callable[[Operator, list[Shape], list[Shape]], Rule | None]
Tensors = Mapping[str, Tensor]
# Returns the inputs in which a call is jointly linear (None: in none), given the values that are zero.
LinearInputs = Callable[[Operator, Container[str]], tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class RuleOfTensors:
    """A rule that depends on more than shapes: on dtypes, or on which argument is which tensor."""

    make: Callable[[Operator, Tensors], Rule | None]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrent operator. `num_states`: states that it reads after its input. `is_cell`: it computes one step. `serial_fraction`:
    fraction of a step's small operators that CPUs run serially (GRU)."""

    num_states: int
    is_cell: bool = False
    serial_fraction: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """How to compute an operator's weight gradient separately: from argument `input_at` and the output gradient, for argument `weight_at`.

    `num_dims`: required of the weight. `formulas`: by overload, the name of the function in `shardwise.lower.split_backward`.
    """

    weight_at: int
    input_at: int
    num_dims: int
    formulas: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Windows:
    """Sliding windows of an operator. `windows_by_label`: by label, the window along it (unlisted labels cannot be sharded). `padding`:
    position of the padding argument, omitted by a rank that has padded its shard; `fill`: padding value (`fill_at`: position of the
    argument that gives it). `counts_padding_at`: position of the flag by which an average counts padding. `tap_cost`: for windows that are
    no products, time to read one entry, forward and backward, in additions of one number."""

    windows_by_label: Callable[[Operator, Tensors], Mapping[str, Window]]
    padding: int | None = None
    fill: float = 0.0
    fill_at: int | None = None
    counts_padding_at: int | None = None
    tap_cost: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Op:
    """The record of all operators in `names` (torch's, without overload, separated by spaces)."""

    names: str
    # Factor rule: lines of notation (`shardwise.ops.rule`), of which the first that fits applies, or a function of the call;
    # `adjust` changes the parsed rule by the arguments of a call.
    rule: str | tuple[str, ...] | RuleOfShapes | RuleOfTensors | None = None
    adjust: Callable[[Operator, Rule, list[Shape]], Rule | None] | None = None
    namespace: str = "aten"
    # Labels of fused dimensions: consecutive runs, each of which is sharded separately (`shardwise.ops.rule.FusedLabel`).
    along: Callable[[Operator, list[Shape], list[Shape]], tuple[FusedLabel, ...]] | None = None

    view_kind: ViewKind = ViewKind.NONE
    # Of a permutation: the input dimension of each output dimension, by the number of dimensions.
    permutation: Callable[[Operator, int], list[int]] | None = None
    mixes_positions: bool = False  # mixes positions along a dimension that keeps its meaning
    concatenates: bool = False  # concatenates tensors
    reads_values: bool = True  # reads values, not only the shape
    sample_invariant: bool = False  # the output is equal for every sample, or random
    shape_at: int | None = None  # position of the output's shape
    fill_at: int | None = None  # position of the fill value
    fill: float | None = None  # the fill value, where it is a constant
    is_random: bool | Callable[[Operator], bool] = False  # draws random numbers
    drawn_shape: Callable[[Operator, Tensors], Shape] | None = None  # shape of the draw, where it is not the output's
    is_identity: Callable[[Operator], bool] | None = None  # whether a call returns its input unchanged
    statistics: tuple[int, int, int] | None = None  # positions of the running statistics and of the training flag
    over_samples: bool = False  # statistics are taken over samples
    windows: Windows | None = None  # sliding windows along positions

    mask_predicate: MaskPredicate = MaskPredicate.NONE

    # Contracted labels are summed: sharding one leaves partial sums.
    contracts: bool = False
    linear: Linearity | LinearInputs = Linearity.NONE
    bias: int | None = None  # position of the operand that is added once, after the sum
    extreme: Extreme = Extreme.NONE
    is_loss: bool = False
    over_classes: bool = False  # classes are in dimension 1; the mean is over targets that count

    num_differentiable: int | None = None  # number of leading inputs that get a gradient; None: all
    non_differentiable_at: tuple[int, ...] = ()  # positions of tensors that torch does not differentiate
    lowering: LoweringKind = LoweringKind.NONE
    allows_fewer_heads: bool = False  # later operands may have fewer entries of a label, as keys of grouped heads
    weight: WeightGradient | None = None  # how its weight gradient is computed separately
    sparse_at: int | None = None  # position of the flag for a sparse gradient

    kind: CostKind = CostKind.ELEMENTWISE
    flops: Callable[[Operator, Tensors], float] | None = None  # FLOPs of a product
    product: MatmulKind = MatmulKind.NONE
    expert_rows: ExpertStage = ExpertStage.NONE
    is_lookup: bool = False  # looks up rows of a weight
    outputs_probabilities: bool = False  # outputs weights that sum to one
    fuses_softmax: bool = False  # contains a softmax whose logarithms are written and saved
    has_many_strategies: bool = False  # has more sharding strategies than propagation considers
    recurrence: Recurrence | None = None

    saves_for_backward: SavedRule = float_inputs  # tensors saved for backward
    saves_normalized: bool = False  # on CPUs: saves a normalized copy as large as the output
    gradient: GradientMemory = GradientMemory.NONE  # memory of an operand's gradient
    backward_temporaries: float = 0.0  # other temporaries of backward, in sizes of the first operand
    conjugates_saved: bool = False  # backward conjugates its saved complex tensors
    transpose_copies: float = 0.0  # copies where gradient and saved tensor differ in dimension order, in output sizes
    contiguous_operands: int = 0  # number of leading operands that are made contiguous
    # Dimension order of each operand's gradient.
    gradient_dim_order: Callable[[Operator], tuple[tuple[int, ...], ...]] | None = None

    autocast: AutocastPolicy = AutocastPolicy.NONE
    dtype_from: int | None = None  # under autocast, the operand whose dtype the output has

    @property
    def over_steps(self) -> bool:
        """Return whether the operator is recurrent layers over a sequence."""
        return self.recurrence is not None and not self.recurrence.is_cell
