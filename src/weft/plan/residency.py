"""What becomes of each layer's activations between its forward and its backward: they stay, move to the host, or are computed again.

In: the words of `recompute=` and `offload=`. Out: a `Residency`, which picks from a stage's layers. A layer is a numbered block of the
model (`h.3`, `encoder.layers.0`), by the path of its module. Where words count layers, the first of a stage move, those after them are
repeated and the rest stay (KARMA: Wahib et al., SC 2020): the first have the longest time for their copies, and when the backward of
those that are repeated comes the others' activations are gone already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from weft.errors import LayoutError
from weft.plan.ranges import read_counts, read_names, shortened, write_counts, write_names

KINDS = ("none", "selective", "full")  # of recomputation, each after those that repeat less
OF_LAYERS = {"recompute": ("full",), "offload": ("activations", "all")}  # words that may say of which layers
_VERBS = {"recompute": "repeats", "offload": "moves"}
_WILD = frozenset("*?[")


def joined(together: Sequence[bool], length: int) -> list[tuple[int, int]]:
    """(first, behind) of the parts into which a row of runs falls: `length` at most of those that go `together`, of the others each alone.

    >>> joined([True, True, True, False, True], 2)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    starts: list[int] = []
    for at, goes in enumerate(together):
        if not (at and goes and together[at - 1] and at - starts[-1] < length):
            starts.append(at)
    return list(zip(starts, [*starts[1:], len(together)][: len(starts)], strict=True))


def kind_of(key: str, value: Any) -> Any:
    """A choice without its layers.

    >>> kind_of("offload", "all:2"), kind_of("schedule", "1f1b")
    ('all', '1f1b')
    """
    return str(value).partition(":")[0] if key in OF_LAYERS else value


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The word of a key. `counts`: layers of each stage, the first ones, or one count for every stage. `names`: layers by name. With
    neither, all of them.

    >>> LayerChoice.parse("recompute", "full:2").chosen(0, ["h.0", "h.1", "h.2"])
    ('h.0', 'h.1')
    >>> LayerChoice.parse("offload", "activations:h.2+x.*").chosen(0, ["h.0", "h.2"])
    ('h.2',)
    """

    key: str
    kind: str = "none"
    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, key: str, text: str) -> LayerChoice:
        """`none`, `selective`, `full`, `full:2` (two layers of each stage), `full:3/1` (of two stages), `full:3x4/1x4` (of eight),
        `full:h.0+h.5` (these layers), `full:h.0-6+h.8` (0 to 6 and 8).

        Raises:
            LayoutError: anything else.
        """
        kind, colon, which = text.partition(":")
        if not colon:
            return cls(key, kind)
        takes = OF_LAYERS[key]
        if kind not in takes or not which:
            one = takes[0]
            raise LayoutError(
                f"{key}={text}: only {' and '.join(takes)} {'take' if len(takes) > 1 else 'takes'} layers; for example {key}={one}:2, "
                f"{key}={one}:3/1 or {key}={one}:h.0+h.5"
            )
        counts = read_counts(which)
        if counts is not None:
            if not any(counts):
                raise LayoutError(f"{key}={text} {_VERBS[key]} no layer; use {key}={'optimizer' if kind == 'all' else 'none'}")
            return cls(key, kind, counts)
        names = read_names(which)
        if not all(names) or "/" in which:
            raise LayoutError(f"{key}={text}: layers are counts by stage ({kind}:3/1) or names ({kind}:h.0+h.5)")
        return cls(key, kind, (), names)

    def __str__(self) -> str:
        which = write_counts(self.counts) or write_names(self.names)
        return f"{self.kind}:{which}" if which else self.kind

    @property
    def picks(self) -> bool:
        """Whether it is of some layers only."""
        return bool(self.counts or self.names)

    @property
    def of_layers(self) -> bool:
        """Whether it is of layers, some or all."""
        return self.kind in OF_LAYERS[self.key]

    def of_stage(self, stage: int) -> LayerChoice:
        """The same with the count of one stage."""
        return replace(self, counts=(self.count(stage),)) if len(self.counts) > 1 else self

    def count(self, stage: int) -> int:
        """Layers that are counted of a stage."""
        return self.counts[stage % len(self.counts)] if self.counts else 0

    def chosen(self, stage: int, layers: Sequence[str]) -> tuple[str, ...]:
        """Those of a stage's layers, in their order, that it is of."""
        if not self.of_layers:
            return ()
        if self.names:
            names, patterns = _told_apart(self.names)
            return tuple(layer for layer in layers if layer in names or any(fnmatchcase(layer, name) for name in patterns))
        return tuple(layers[: self.count(stage)] if self.counts else layers)


@cache
def _told_apart(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Names of layers as they are, and patterns."""
    patterns = tuple(name for name in names if not _WILD.isdisjoint(name))
    return frozenset(names) - frozenset(patterns), patterns


@dataclass(frozen=True, slots=True)
class Residency:
    """`recompute=` and `offload=` together. Layers that `offload` picks are not repeated: `recompute` is of the others.

    Offload of all layers moves whatever they keep, which of one that is repeated is what enters it. `segment`: layers one after another
    that are repeated together, of which only what enters the first is kept (Chen et al. 2016).

    >>> both = Residency.parse("full:1", "activations:2")
    >>> both.moved(0, ["h.0", "h.1", "h.2", "h.3"]), both.repeated(0, ["h.0", "h.1", "h.2", "h.3"])
    (('h.0', 'h.1'), ('h.2',))
    """

    recompute: LayerChoice = LayerChoice("recompute")
    offload: LayerChoice = LayerChoice("offload")
    segment: int = 1

    @staticmethod
    @cache
    def parse(recompute: str, offload: str, segment: int = 1) -> Residency:
        """Raises LayoutError."""
        return Residency(LayerChoice.parse("recompute", recompute), LayerChoice.parse("offload", offload), segment)

    @property
    def picks(self) -> bool:
        """Whether it is of some layers only."""
        return self.recompute.picks or self.offload.picks

    def of_stage(self, stage: int) -> Residency:
        """The same for one stage: its own counts of layers.

        >>> str(Residency.parse("full:3/1", "none").of_stage(1).recompute)
        'full:1'
        """
        if len(self.recompute.counts) < 2 and len(self.offload.counts) < 2:
            return self
        return replace(self, recompute=self.recompute.of_stage(stage), offload=self.offload.of_stage(stage))

    @property
    def names(self) -> bool:
        """Whether it tells layers apart by name."""
        return bool(self.recompute.names or self.offload.names)

    def moved(self, stage: int, layers: Sequence[str]) -> tuple[str, ...]:
        """Those of a stage's layers that lie on the host between forward and backward."""
        return self.offload.chosen(stage, layers)

    def repeated(self, stage: int, layers: Sequence[str]) -> tuple[str, ...]:
        """Those of a stage's layers that are computed again."""
        gone = set(self.moved(stage, layers)) if self.offload.picks else set()
        return self.recompute.chosen(stage, [layer for layer in layers if layer not in gone])

    def check(self, stages: Sequence[Sequence[str]]) -> None:
        """Check against the layers of every stage.

        Raises:
            LayoutError: a name that none of the model's layers has, more layers than a stage has, or layers that would be both moved
                and repeated.
        """
        all_layers = dict.fromkeys(layer for layers in stages for layer in layers if layer)
        for choice in (self.recompute, self.offload):
            for name in choice.names:
                if name not in all_layers and not any(fnmatchcase(layer, name) for layer in all_layers):
                    has = ", ".join(shortened(all_layers)) if all_layers else "none that is numbered"
                    raise LayoutError(f"{choice.key}={choice.kind}:{name}: the model has no such layer; it has {has}")
        said = " ".join(f"{choice.key}={choice}" for choice in (self.recompute, self.offload) if choice.picks)
        for stage, layers in enumerate(stages):
            moves, again = self._num_moved(stage, layers), self.recompute.count(stage)
            if moves + again > len(layers):
                counted = f"{moves} moved and {again} others repeated are {moves + again}" if moves and again else str(moves or again)
                raise LayoutError(f"{said}: {counted} layers of stage {stage}, which has {len(layers)}; {self._fewer(stages)}")
            both = set(self.moved(stage, layers)) & set(self.recompute.chosen(stage, layers)) if self.recompute.names else set()
            if both and self.offload.picks:
                names = ", ".join(shortened(layer for layer in layers if layer in both))
                raise LayoutError(
                    f"{said}: {len(both)} of the {len(layers)} layers of stage {stage} would be both offloaded and recomputed ({names}); "
                    "name each in one of them"
                )

    def _num_moved(self, stage: int, layers: Sequence[str]) -> int:
        """Layers of a stage that `offload` picks, counted as it says."""
        return self.offload.count(stage) if self.offload.counts else len(self.moved(stage, layers)) * self.offload.picks

    def _fewer(self, stages: Sequence[Sequence[str]]) -> str:
        """What to write instead of counts of more layers than there are: as many of each stage as it has, those that move first."""
        moved = [min(self._num_moved(stage, layers), len(layers)) for stage, layers in enumerate(stages)]
        again = [min(self.recompute.count(stage), len(layers) - n) for stage, (layers, n) in enumerate(zip(stages, moved, strict=True))]
        words = []
        for choice, counts in ((self.offload, moved), (self.recompute, again)):
            if choice.counts:
                written = write_counts(counts if len(set(counts)) > 1 else counts[:1])
                words.append(f"{choice.key}={choice.kind}:{written}" if any(counts) else f"{choice.key}=none")
        return f"use at most {' '.join(words)}"


def refuse_segment(which: Residency, zero: int) -> str:
    """Why layers cannot be repeated several at a time with a stage of ZeRO; empty where they can, or need not.

    >>> refuse_segment(Residency.parse("none", "none", 2), 0)
    'segment=2 repeats layers together, and recompute=none repeats none; use recompute=full, or leave segment out'
    """
    if which.segment == 1:
        return ""
    said = f"segment={which.segment} repeats layers together"
    if not which.recompute.of_layers:
        return f"{said}, and recompute={which.recompute} repeats none; use recompute=full, or leave segment out"
    if which.offload.of_layers:
        return f"{said}, which with offload={which.offload} is not supported; use offload=none or optimizer, or leave segment out"
    if zero == 3:
        return f"{said}, which with zero=3 is not supported: weights are gathered layer by layer; use zero=2 or less, or leave segment out"
    return ""
