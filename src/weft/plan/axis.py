"""What each mesh axis may cut, as data: a row an axis. In: an axis' name. Out: its row.

Kinds of dimensions: samples of the batch; features, which weights have too; experts, of which a weight has a matrix each; positions of
an image (width is the last dimension, height the one before, planes the one before that; `outermost` is the first that an image has,
whatever it is). `weft.model.labels` tells of each operator's labels which kind they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod

from weft.plan.grid import AXES, NESTED, PLAIN, counts

SAMPLES, FEATURES, EXPERTS, OUTERMOST, PLANES, HEIGHT, WIDTH = "samples", "features", "experts", "outermost", "planes", "height", "width"
POSITIONS = (PLANES, HEIGHT, WIDTH)  # outermost first


@dataclass(frozen=True, slots=True)
class Axis:
    """`cuts`: kinds of dimensions that it may cut. `again`: whether it may cut the pieces of another axis once more."""

    name: str
    cuts: frozenset[str] = frozenset()
    again: bool = False

    @property
    def cuts_weights(self) -> bool:
        """Whether weights are cut over it, experts' aside; otherwise every rank has them whole, and sums their gradients."""
        return FEATURES in self.cuts

    @property
    def cuts_experts(self) -> bool:
        return EXPERTS in self.cuts

    @property
    def cuts_samples(self) -> bool:
        return SAMPLES in self.cuts

    @property
    def cuts_positions(self) -> bool:
        return any(kind in self.cuts for kind in (OUTERMOST, *POSITIONS))

    @property
    def follows(self) -> bool:
        """Whether every operator that can be cut is, whatever the latency: that is what such an axis is for."""
        return not self.cuts_weights


DATA, EXPERT, PIPELINE = "data", "expert", "pipeline"
_ROWS = (
    Axis(PIPELINE),
    Axis(DATA, frozenset({SAMPLES})),
    Axis(EXPERT, frozenset({SAMPLES, EXPERTS}), again=True),
    Axis("spatial", frozenset({OUTERMOST})),
    *(Axis(kind, frozenset({kind})) for kind in POSITIONS),
    *(Axis(name, frozenset({FEATURES}), again=name == NESTED) for name in (PLAIN, *AXES)),
)
TABLE = {row.name: row for row in _ROWS}


@cache
def axis_of(name: str) -> Axis:
    """The row of an axis; a name that the table lacks is one of tensor ranks."""
    return TABLE.get(name) or Axis(name, frozenset({FEATURES}))


def sample_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Those along which ranks have other samples.

    >>> sample_axes(("data", "expert", "tensor"))
    ('data', 'expert')
    """
    return tuple(axis for axis in axes if axis_of(axis).cuts_samples)


def axis_words(row: Axis) -> str:
    """What a row's axis shards of an image.

    >>> axis_words(axis_of("height")), axis_words(axis_of("spatial"))
    ('its height', 'any of its dimensions')
    """
    return "any of its dimensions" if OUTERMOST in row.cuts else " or ".join(f"its {kind}" for kind in POSITIONS if kind in row.cuts)


HOW = "use a count (spatial=4), height x width (spatial=2x2) or planes x height x width (spatial=2x2x2)"


@cache  # a search asks of every layout
def parse_spatial(text: str) -> tuple[tuple[str, int], ...]:
    """The mesh axes that cut an image, outermost first, those of more than one rank: of a count the first dimension that there is.

    >>> parse_spatial("4"), parse_spatial("2x1"), parse_spatial("2x1x4"), parse_spatial("1")
    ((('spatial', 4),), (('height', 2),), (('planes', 2), ('width', 4)), ())

    Raises:
        LayoutError: no such text, an axis without ranks, more than three axes.
    """
    sizes = counts("spatial", text, "an image", HOW)
    names = ("spatial",) if len(sizes) == 1 else POSITIONS[-len(sizes) :]
    return tuple((name, n) for name, n in zip(names, sizes, strict=True) if n > 1)


@cache
def spatial_ranks(text: str) -> int:
    """Ranks that share an image.

    >>> spatial_ranks("2x4")
    8
    """
    return prod(n for _, n in parse_spatial(text))
