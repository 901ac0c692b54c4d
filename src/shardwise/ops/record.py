"""The record of an operator: its sharding rule, memory format, backward behavior, randomness, cost and lowering.

Planner, cost model, lowering and checks read these fields and nothing else, grouped by what they are about. A field that a record leaves
out has the default that fits most operators: no rule (the operator is replicated), elementwise, not random, inputs saved for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from shardwise.ops.operator import Operator, Tensor
from shardwise.ops.rule import FusedLabel, Rule
from shardwise.ops.saved_tensors import SavedRule, float_inputs, integer_inputs
from shardwise.ops.sliding_window import Window
from shardwise.ops.vocabulary import (
    AutocastPolicy,
    CostKind,
    GradientMemory,
    Linearity,
    LoweringKind,
    MaskPredicate,
    MatmulKind,
    Reduction,
    ViewKind,
)

Shape = tuple[int, ...]
RuleOfShapes = Callable[[Operator, list[Shape], list[Shape]], Rule | None]
Tensors = Mapping[str, Tensor]
# Returns the inputs in which a call is jointly linear (None: in none), given the values that are zero.
AutocastOfCall = Callable[[Operator, Tensors], AutocastPolicy]
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
class Product:
    """A product or look-up. `flops`: FLOPs of a call. `kind`: its operands. `weight`: how its weight gradient is computed separately.
    `bias`: position of the operand that is added once, after the sum. `sparse_at`: position of the flag for a sparse gradient.
    `contiguous_operands`: number of leading operands that are made contiguous."""

    flops: Callable[[Operator, Tensors], float] | None = None
    kind: MatmulKind = MatmulKind.NONE
    weight: WeightGradient | None = None
    bias: int | None = None
    sparse_at: int | None = None
    contiguous_operands: int = 0

    @property
    def is_lookup(self) -> bool:
        return self.kind == MatmulKind.LOOKUP


@dataclass(frozen=True, slots=True)
class View:
    """A view or rearrangement. `permutation`: the input dimension of each output dimension, by the number of dimensions.
    `mixes_positions`: along a dimension that keeps its meaning. `concatenates`: several tensors."""

    kind: ViewKind = ViewKind.NONE
    permutation: Callable[[Operator, int], list[int]] | None = None
    mixes_positions: bool = False
    concatenates: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """Values of the output. `shape_at`, `fill_at`: positions of its shape and of its fill value; `fill`: the latter, where it is a
    constant. `reads_values`: it depends on values, not only on shapes. `sample_invariant`: it is equal for every sample, or random. `mask`:
    predicate of positions that it is. `is_probability`: weights that sum to one."""

    shape_at: int | None = None
    fill_at: int | None = None
    fill: float | None = None
    reads_values: bool = True
    sample_invariant: bool = False
    mask: MaskPredicate = MaskPredicate.NONE
    is_probability: bool = False


@dataclass(frozen=True, slots=True)
class RandomDraw:
    """A draw of random numbers, by all calls or some. `shape`: of the draw, where it is not the output's. `is_identity`: whether a call
    returns its input unchanged."""

    is_active: bool | Callable[[Operator], bool] = False
    shape: Callable[[Operator, Tensors], Shape] | None = None
    is_identity: Callable[[Operator], bool] | None = None


@dataclass(frozen=True, slots=True)
class RunningStatistics:
    """Running statistics. `positions`: theirs, and of the training flag. `over_samples`: they are taken over samples."""

    positions: tuple[int, int, int] | None = None
    over_samples: bool = False


@dataclass(frozen=True, slots=True)
class Backward:
    """What backward needs and computes. `saved`: tensors saved for it. `gradient`: memory of an operand's gradient. `num_differentiable`:
    number of leading inputs that get a gradient (None: all); `non_differentiable_at`: positions of tensors that torch does not
    differentiate. `temporaries`: other temporaries, in sizes of the first operand. `transpose_copies`: copies where gradient and saved
    tensor differ in dimension order, in output sizes. `conjugates_saved`: it conjugates its saved complex tensors. `saves_normalized`: on
    CPUs, a normalized copy as large as the output is saved. `saves_log_softmax`: forward contains a softmax whose logarithms are written
    and saved. `gradient_dim_order`: dimension order of each operand's gradient."""

    saved: SavedRule = float_inputs
    gradient: GradientMemory = GradientMemory.NONE
    num_differentiable: int | None = None
    non_differentiable_at: tuple[int, ...] = ()
    temporaries: float = 0.0
    transpose_copies: float = 0.0
    conjugates_saved: bool = False
    saves_normalized: bool = False
    saves_log_softmax: bool = False
    gradient_dim_order: Callable[[Operator], tuple[tuple[int, ...], ...]] | None = None


SAVES_INTEGERS = Backward(integer_inputs)
ALIASES_GRADIENT = Backward(gradient=GradientMemory.ALIAS)


@dataclass(frozen=True, slots=True)
class Op:
    """The record of all operators in `names` (without overload, separated by spaces; torch's, or "shardwise.name")."""

    names: str
    # Factor rule: lines of notation (`shardwise.ops.rule`), of which the first that fits applies, or a function of the call;
    # `adjust` changes the parsed rule by the arguments of a call.
    rule: str | tuple[str, ...] | RuleOfShapes | RuleOfTensors | None = None
    adjust: Callable[[Operator, Rule, list[Shape]], Rule | None] | None = None
    # Labels of fused dimensions: consecutive runs, each of which is sharded separately (`shardwise.ops.rule.FusedLabel`).
    along: Callable[[Operator, list[Shape], list[Shape]], tuple[FusedLabel, ...]] | None = None
    linear: Linearity | LinearInputs = Linearity.NONE
    reduction: Reduction = Reduction.NONE
    kind: CostKind = CostKind.ELEMENTWISE
    product: Product = Product()
    view: View = View()
    output: Output = Output()
    draw: RandomDraw = RandomDraw()
    windows: Windows | None = None
    statistics: RunningStatistics = RunningStatistics()
    recurrence: Recurrence | None = None
    backward: Backward = Backward()
    lowering: LoweringKind = LoweringKind.NONE
    autocast: AutocastPolicy | AutocastOfCall = AutocastPolicy.NONE

    @property
    def expert_stage(self) -> LoweringKind:
        """Return the lowering of an operator on data-dependent rows of experts, see `shardwise.ops.experts`; NONE for others."""
        stages = (LoweringKind.EXPERT_DISPATCH, LoweringKind.EXPERT_MATMUL, LoweringKind.EXPERT_COMBINE)
        return self.lowering if self.lowering in stages else LoweringKind.NONE

    @property
    def over_steps(self) -> bool:
        """Return whether the operator is recurrent layers over a sequence."""
        return self.recurrence is not None and not self.recurrence.is_cell
