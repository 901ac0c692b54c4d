"""What is known of an operator, in one record: what planner, cost, lowering and checks ask of it, and nothing else.

In: the fields that a family's file fills in (`pointwise`, `products`, ...). Out: `Op`. A field that a record leaves out has the answer
that fits most operators: no rule (it is replicated), elementwise, nothing drawn, its operands kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from weft.ops.keeps import Keeps, floats
from weft.ops.operator import Operator, Tensor
from weft.ops.rule import Along, Rule
from weft.ops.sliding_window import Window

Shape = tuple[int, ...]
Made = Callable[[Operator, list[Shape], list[Shape]], Rule | None]
Tensors = Mapping[str, Tensor]
# Values that an operator, linear in some of its tensors together, is linear in (None: not in this call), given values that are zero.
Carries = Callable[[Operator, Container[str]], tuple[str, ...] | None]

KINDS = (
    "linear", "attention", "convolution", "recurrent", "elementwise", "activation", "norm", "batch_norm", "softmax", "gather", "make",
    "view",
)  # fmt: skip
MOVES = ("", "reshape", "expand", "repeat", "part", "same", "rows", "cast", "copy")
LINEAR = ("", "together", "sum", "each", "numerator")
AUTOCAST = ("", "lower", "wider", "first", "apart", "narrow")
PRODUCT = ("", "linear", "weight", "stacked", "grouped")
RAGGED = ("", "begins", "goes on", "ends")
GRADIENT = ("", "same", "summed", "broadcast", "scattered", "spectrum", "padded")


@dataclass(frozen=True, slots=True)
class ByTensors:
    """A rule that is made of more than shapes: of dtypes, or of which argument is which tensor."""

    make: Callable[[Operator, Tensors], Rule | None]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """`states`: how many it reads behind its input. `is_cell`: it makes one step. `single`: of a GRU's small operators in a step, the part
    that processors run one by one."""

    states: int
    is_cell: bool = False
    single: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """How an operator's weight gradient is made by itself: from argument `x`, and the gradient of what is made, for argument `weight`.

    `dims`: that the weight must have. `formulas`: by overload, the name of the function in `weft.lower.split_backward`.
    """

    weight: int
    x: int
    dims: int
    formulas: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Windows:
    """`of`: by label, the window that slides along it (a label that it leaves out comes whole). `padding`: position of the padding, which a
    rank that has padded its piece leaves out; `fill`: what is padded with (a position: of the argument that says it). `counts`: position of
    whether an average counts padding. `tap`: of windows that are no products, how long reading one of their entries takes, forward and
    backward, in additions of one number."""

    of: Callable[[Operator, Tensors], Mapping[str, Window]]
    padding: int | None = None
    fill: float = 0.0
    fill_at: int | None = None
    counts: int | None = None
    tap: tuple[float, float] = (0.0, 0.0)


# What an operator tells those who ask what a mask of positions hides: its elements are numbers in order; the first operand is at most,
# or at least, the second; all operands hold; the one operand does not; a number stands where the second operand holds; nothing stands
# above the diagonal.
COUNTS, AT_MOST, AT_LEAST, ALL_HOLD, NOT, FILLS, LOWER = "counts", "at most", "at least", "all hold", "not", "fills", "lower"


@dataclass(frozen=True, slots=True)
class Op:
    """One record, of all operators in `names` (torch's, without overload, separated by spaces). What a field asks stands above it."""

    names: str
    # How it can be cut: a line of notation (`weft.ops.rule`), several of which the first that fits, or a function of the call; and what
    # notation cannot say of a call.
    rule: str | tuple[str, ...] | Made | ByTensors | None = None
    adjust: Callable[[Operator, Rule, list[Shape]], Rule | None] | None = None
    namespace: str = "aten"
    # Labels whose dimensions are runs, one behind another, each cut by itself (`weft.ops.rule.Along`).
    along: Callable[[Operator, list[Shape], list[Shape]], tuple[Along, ...]] | None = None

    # How elements lie in what is made: in another shape ("reshape"), repeated ("expand", "repeat"), a "part", the "same" view, a copy in
    # "rows", in another dtype ("cast"), a "copy".
    moves: str = ""
    # Which dimension of what is read each dimension of what is made is, of so many, where it turns them round.
    turn: Callable[[Operator, int], list[int]] | None = None
    shifts: bool = False  # it mixes positions, and leaves a dimension what it is
    joins: bool = False  # it puts tensors together
    reads: bool = True  # values, not the shape alone
    sample_invariant: bool = False  # it makes the same for every sample, or draws
    shape_at: int | None = None  # position of the result's shape
    fill_at: int | None = None  # position of the number that fills it
    fill: float | None = None  # that number, where it is always one
    draws: bool | Callable[[Operator], bool] = False  # random numbers
    drawn_shape: Callable[[Operator, Tensors], Shape] | None = None  # of which shape, where that is not the result's
    idle: Callable[[Operator], bool] | None = None  # whether a call hands back what it is given
    statistics: tuple[int, int, int] | None = None  # positions of running statistics and of the switch that has them written
    over_samples: bool = False  # its statistics are
    windows: Windows | None = None  # that slide along positions

    tells: str = ""  # of positions: `COUNTS` and so on, above

    # What is made is a sum over a label that is contracted.
    contracts: bool = False
    # Linear in all tensors "together", in a "sum" also beside numbers, in "each" by itself, in its "numerator"; or in which of a call.
    linear: str | Carries = ""
    bias: int | None = None  # position of an operand that is added once, after the sum
    extreme: str = ""  # the "largest" or the "least" of its elements
    is_loss: bool = False
    over_classes: bool = False  # which lie in dimension 1; the mean of such a loss is over the targets that count

    learns: int | None = None  # how many of its tensors it hands a gradient on to; None: all
    closed: tuple[int, ...] = ()  # positions of tensors by which torch does not differentiate
    lowering: str = ""  # how `weft.lower.special` calls it, where that is not as it stands
    repeats: bool = False  # later operands may have fewer entries of a label, each for several of the first's (heads of keys)
    weight: WeightGradient | None = None  # how its weight gradient is made by itself
    sparse_at: int | None = None  # position of what asks for a sparse one

    # What its speed depends on, see `weft.model.work.Work`; FLOPs of a product.
    kind: str = "elementwise"
    flops: Callable[[Operator, Tensors], float] | None = None
    # A product of an activation with a weight that is (outputs, inputs), "linear", or another, "weight"; of "stacked" matrices; "grouped".
    product: str = ""
    ragged: str = ""  # whether rows that follow from data begin here, go on or end, see `weft.ops.experts`
    looks_up: bool = False  # it reads rows of a weight
    normalises: bool = False  # it makes weights that sum to one
    fuses_softmax: bool = False  # there is one inside, whose logarithms are written and kept
    many_ways: bool = False  # it can be cut in more ways than propagation follows
    recurrence: Recurrence | None = None

    keeps: Keeps = floats  # for backward
    keeps_normalised: bool = False  # on processors, as large as the result
    # How an operand's gradient lies to the result's: the "same" memory, so but "summed" where the operand was repeated, as large as the
    # result ("broadcast"), added up where elements came from ("scattered"), a complex "spectrum" of what is real, or one that was "padded".
    gradient: str = ""
    makes: float = 0.0  # in backward besides, in sizes of the first operand
    conjugates: bool = False  # what it kept, of complex numbers
    turned: float = 0.0  # what is copied where the gradient comes in another order than what was kept, in sizes of the result
    rows: int = 0  # so many operands are copied into rows, where they do not lie so
    # In which order the gradient of each operand comes.
    orders: Callable[[Operator], tuple[tuple[int, ...], ...]] | None = None

    # Under autocast operands are cast "lower" or "wider", the result has the "first" one's type, each has its own ("apart"), or it is
    # "narrow"; and the operand whose type the result has.
    autocast: str = ""
    decides: int | None = None

    @property
    def over_steps(self) -> bool:
        """Whether it is layers of a recurrence over a sequence."""
        return self.recurrence is not None and not self.recurrence.is_cell

    def __post_init__(self) -> None:
        words = (
            (self.kind, KINDS), (self.moves, MOVES), (self.product, PRODUCT), (self.ragged, RAGGED), (self.autocast, AUTOCAST),
            (self.gradient, GRADIENT),
        )  # fmt: skip
        for word, values in (*words, *([(self.linear, LINEAR)] if isinstance(self.linear, str) else [])):
            if word not in values:
                raise ValueError(f"{self.names}: {word!r} is none of {', '.join(map(repr, values))}")
