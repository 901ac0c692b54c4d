"""Mesh axes as data: one row an axis, with the kinds of dimensions that it may shard.

Kinds of dimensions: samples of the batch; features, which weights have too; experts, of which a weight has a matrix each; positions of an
image (width is the last dimension, height the one before, planes the one before that; `outermost` is the first that an image has, whichever
it is); positions of a sequence. `shardwise.model.dims.labels` assigns a kind to each operator's labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

from shardwise.errors import LayoutError
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.grid import GRID_AXES, NESTED, TENSOR, parse_counts

SAMPLES, FEATURES, EXPERTS, OUTERMOST, PLANES, HEIGHT, WIDTH = "samples", "features", "experts", "outermost", "planes", "height", "width"
POSITIONS = (PLANES, HEIGHT, WIDTH)  # outermost first
SEQUENCE = "sequence"
CHANNELS = "channels"  # features of an image: those that convolutions multiply, and values placed like them
# Attention under context parallelism: gather all keys; exchange positions for heads, so that each rank attends to all positions with some
# of the heads (Jacobs et al. 2023, DeepSpeed-Ulysses); pass keys around the ranks (Liu et al. 2023, ring attention); or `auto`: gather or
# Ulysses, whichever sends fewer bytes, operator by operator. `ulysses+ring`: adjacent ranks exchange positions for heads, and keys are
# passed around between such groups (Fang and Zhao 2024, arXiv 2405.07719).
GATHER, ULYSSES, RING, ULYSSES_RING = "gather", "ulysses", "ring", "ulysses+ring"
ATTENTION = (AUTO, GATHER, ULYSSES, RING, ULYSSES_RING)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis. `shards`: kinds of dimensions that it may shard. `may_reshard`: whether it may shard another axis's shards once more.
    `owns_operators`: whether one of its ranks may run an operator for all."""

    name: str
    shards: frozenset[str] = frozenset()
    may_reshard: bool = False
    owns_operators: bool = False

    @property
    def shards_weights(self) -> bool:
        """Return whether weights are sharded over it, experts aside; otherwise every rank holds them whole, and their gradients are
        reduced."""
        return self.shards_channels or FEATURES in self.shards

    @property
    def shards_channels(self) -> bool:
        return CHANNELS in self.shards

    @property
    def shards_experts(self) -> bool:
        return EXPERTS in self.shards

    @property
    def shards_samples(self) -> bool:
        return SAMPLES in self.shards

    @property
    def has_replicas(self) -> bool:
        """Return whether its ranks are replicas, each with samples of its own; ranks along other axes share their samples."""
        return self.shards_samples and not self.owns_operators

    @property
    def shards_positions(self) -> bool:
        return self.shards_sequences or any(kind in self.shards for kind in (OUTERMOST, *POSITIONS))

    @property
    def shards_sequences(self) -> bool:
        return SEQUENCE in self.shards

    @property
    def always_shards(self) -> bool:
        """Return whether every operator that can be sharded is, whatever the latency: the purpose of such an axis."""
        return not self.shards_weights


DATA, EXPERT, BRANCH, PIPELINE, CONTEXT, CHANNEL = "data", "expert", "branch", "pipeline", "context", "channel"
_ROWS = (
    Axis(PIPELINE),
    Axis(DATA, frozenset({SAMPLES})),
    Axis(EXPERT, frozenset({SAMPLES, EXPERTS}), may_reshard=True),
    Axis(BRANCH, frozenset({SAMPLES}), may_reshard=True, owns_operators=True),
    Axis(CONTEXT, frozenset({SEQUENCE})),
    Axis("spatial", frozenset({OUTERMOST})),
    *(Axis(kind, frozenset({kind})) for kind in POSITIONS),
    Axis(CHANNEL, frozenset({CHANNELS})),
    *(Axis(name, frozenset({FEATURES}), may_reshard=name == NESTED) for name in (TENSOR, *GRID_AXES)),
)
AXIS_TABLE = {row.name: row for row in _ROWS}


@cache
def axis_of(name: str) -> Axis:
    """Return the row of an axis; a name that the table lacks is one of tensor ranks."""
    return AXIS_TABLE.get(name) or Axis(name, frozenset({FEATURES}))


def sample_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes along which ranks have different samples, in the order in which they shard the batch.

    >>> sample_axes(("data", "expert", "tensor"))
    ('data', 'expert')
    """
    sharding = {axis for axis in axes if axis_of(axis).shards_samples}
    return tuple(axis for axis in AXIS_TABLE if axis in sharding)


def layout_word(axis: str, sizes: Mapping[str, int]) -> str:
    """Return the word of a layout that gives an axis its ranks, as users write it; `sizes`: of all mesh axes.

    >>> layout_word("height", {"height": 2, "width": 2}), layout_word("width", {"width": 2}), layout_word("rows", {"rows": 2, "columns": 4})
    ('spatial=2x2', 'spatial=1x2', 'tensor=2x4')
    """
    names = POSITIONS if axis in POSITIONS else GRID_AXES if axis in GRID_AXES else ()
    if not names:
        return f"{axis}={sizes[axis]}"
    present = [i for i, name in enumerate(names) if name in sizes]
    used = names[present[0] :] if names is POSITIONS else names[: present[-1] + 1]
    used = used if len(used) > 1 else names[-2:]
    return f"{'spatial' if names is POSITIONS else TENSOR}={'x'.join(str(sizes.get(name, 1)) for name in used)}"


def explain_unshardable(row: Axis, n: int, sizes: Mapping[str, int] | None = None) -> str:
    """Explain that an axis of positions or channels cannot have so many ranks, in a model that has none such.

    >>> explain_unshardable(axis_of("context"), 4)
    'context=4 shares sequences, and no attention, recurrence or look-up of this model is over 4 positions or more'
    """
    if row.shards_sequences:
        return f"{row.name}={n} shares sequences, and no attention, recurrence or look-up of this model is over {n} positions or more"
    if row.shards_channels:
        return f"{row.name}={n} shares channels of images, and no convolution of this model has {n} channels or more"
    along = "any of its dimensions" if OUTERMOST in row.shards else " or ".join(f"its {kind}" for kind in POSITIONS if kind in row.shards)
    word = layout_word(row.name, sizes or {row.name: n})
    return f"{word} shares images, and no window of this model slides along {along} where that has {n} entries or more"


def attention_kind(word: str) -> str:
    """Return a value for `attention` without its number of Ulysses ranks.

    >>> attention_kind("ulysses:2+ring"), attention_kind("ring:2")
    ('ulysses+ring', 'ring:2')
    """
    first, plus, rest = word.partition("+")
    kind = first.partition(":")[0] + plus + rest
    return kind if kind == ULYSSES_RING else word


@cache
def ulysses_group_size(word: str, context: int) -> int:
    """Number of the `context` ranks that exchange heads (Ulysses) in a value for `attention`; 0: as many as there are heads for.

    >>> ulysses_group_size("ulysses:2+ring", 8), ulysses_group_size("ulysses+ring", 8), ulysses_group_size("ring", 8)
    (2, 0, 1)

    Raises:
        LayoutError: no count, or one that does not divide `context`.
    """
    if attention_kind(word) != ULYSSES_RING:
        return 1
    _, colon, count = word.partition("+")[0].partition(":")
    if not colon:
        return 0
    if not count.isdecimal() or not int(count) or context % int(count):
        fits = ", ".join(f"ulysses:{n}+ring" for n in range(2, context) if context % n == 0) or RING
        raise LayoutError(f"attention={word} exchanges heads among ranks of context={context}; use a number that divides: {fits}")
    return int(count)


def normalize_attention(word: str, context: int) -> str:
    """Normalise a value for `attention` for so many ranks: `auto` on one rank, and `ring` where no ranks exchange heads.

    >>> normalize_attention("ring", 1), normalize_attention("ulysses:1+ring", 2)
    ('auto', 'ring')
    """
    if context == 1:
        return AUTO
    return RING if attention_kind(word) == ULYSSES_RING and ulysses_group_size(word, context) == 1 else word


SPATIAL_USAGE = "use a count (spatial=4), height x width (spatial=2x2) or planes x height x width (spatial=2x2x2)"


@cache  # a search calls it for every layout
def parse_spatial(text: str) -> tuple[tuple[str, int], ...]:
    """Return the mesh axes that shard an image, outermost first, those of more than one rank: of a count the image's first dimension.

    >>> parse_spatial("4"), parse_spatial("2x1"), parse_spatial("2x1x4"), parse_spatial("1")
    ((('spatial', 4),), (('height', 2),), (('planes', 2), ('width', 4)), ())

    Raises:
        LayoutError: no such text, an axis without ranks, more than three axes.
    """
    sizes = parse_counts("spatial", text, "an image", SPATIAL_USAGE)
    names = ("spatial",) if len(sizes) == 1 else POSITIONS[-len(sizes) :]
    return tuple((name, n) for name, n in zip(names, sizes, strict=True) if n > 1)


@cache
def spatial_ranks(text: str) -> int:
    """Number of ranks that share an image.

    >>> spatial_ranks("2x4")
    8
    """
    return prod(n for _, n in parse_spatial(text))
