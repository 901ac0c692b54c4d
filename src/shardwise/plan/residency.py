"""Residency of each layer's activations between forward and backward: kept on the device, offloaded to the host, or recomputed.

Parses `recompute=` and `offload=` into a `Residency`, which selects a stage's layers. A layer is a numbered block of the model (`h.3`,
`encoder.layers.0`), by the path of its module. Where words count layers, the first of a stage are offloaded, those after them recomputed
and the rest kept (KARMA: Wahib et al., SC 2020): the first have the longest time for their copies, and in the backward of those that are
recomputed the activations of the later ones are freed already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from shardwise.errors import LayoutError
from shardwise.plan.ir.ranges import read_counts, read_names, shorten_names, write_counts, write_names

CHEAP = "cheap"
RECOMPUTE_KINDS = ("none", "selective", CHEAP, "full")  # of recomputation, each after those that keep more
LAYER_WORDS = {"recompute": ("full", CHEAP), "offload": ("activations", "all")}  # values that may name layers
_VERBS = {"recompute": "recomputes", "offload": "offloads"}
_WILD = frozenset("*?[")


def split_segments(joins_previous: Sequence[bool], length: int) -> list[tuple[int, int]]:
    """Split a row of runs into segments (first, end): at most `length` adjacent runs that may be joined, the others each alone.

    >>> split_segments([True, True, True, False, True], 2)
    [(0, 2), (2, 3), (3, 4), (4, 5)]
    """
    starts: list[int] = []
    for at, joins in enumerate(joins_previous):
        if not (at and joins and joins_previous[at - 1] and at - starts[-1] < length):
            starts.append(at)
    return list(zip(starts, [*starts[1:], len(joins_previous)][: len(starts)], strict=True))


def strip_layers(key: str, value: Any) -> Any:
    """Return a choice without its layers.

    >>> strip_layers("offload", "all:2"), strip_layers("schedule", "1f1b")
    ('all', '1f1b')
    """
    return str(value).partition(":")[0] if key in LAYER_WORDS else value


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """Value of a key. `counts`: number of layers of each stage, the first ones, or one count for every stage. `selects_by_name`: layers
    by name. With
    neither, all of them.

    >>> LayerChoice.parse("recompute", "full:2").selected_layers(0, ["h.0", "h.1", "h.2"])
    ('h.0', 'h.1')
    >>> LayerChoice.parse("offload", "activations:h.2+x.*").selected_layers(0, ["h.0", "h.2"])
    ('h.2',)
    """

    key: str
    kind: str = "none"
    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, key: str, text: str) -> LayerChoice:
        """Parse `none`, `selective`, `cheap`, `full`, `full:2` (or `cheap:2`; two layers of each stage),
        `full:3/1` (of two stages), `full:3x4/1x4` (of eight),
        `full:h.0+h.5` (these layers), `full:h.0-6+h.8` (0 to 6 and 8).

        Raises:
            LayoutError: anything else.
        """
        kind, colon, layers = text.partition(":")
        if not colon:
            return cls(key, kind)
        takes = LAYER_WORDS[key]
        if kind not in takes or not layers:
            example = takes[0]
            raise LayoutError(
                f"{key}={text}: only {' and '.join(takes)} take layers; for example {key}={example}:2, "
                f"{key}={example}:3/1 or {key}={example}:h.0+h.5"
            )
        counts = read_counts(layers)
        if counts is not None:
            if not any(counts):
                raise LayoutError(f"{key}={text} {_VERBS[key]} no layer; use {key}={'optimizer' if kind == 'all' else 'none'}")
            return cls(key, kind, counts)
        names = read_names(layers)
        if not all(names) or "/" in layers:
            raise LayoutError(f"{key}={text}: layers are counts by stage ({kind}:3/1) or names ({kind}:h.0+h.5)")
        return cls(key, kind, (), names)

    def __str__(self) -> str:
        layers = write_counts(self.counts) or write_names(self.names)
        return f"{self.kind}:{layers}" if layers else self.kind

    @property
    def is_partial(self) -> bool:
        """Return whether it applies to some layers only."""
        return bool(self.counts or self.names)

    @property
    def applies_to_layers(self) -> bool:
        """Return whether it applies to layers, some or all."""
        return self.kind in LAYER_WORDS[self.key]

    def of_stage(self, stage: int) -> LayerChoice:
        """Return the choice with the count of one stage."""
        return replace(self, counts=(self.num_counted(stage),)) if len(self.counts) > 1 else self

    def num_counted(self, stage: int) -> int:
        """Number of layers that it counts for a stage."""
        return self.counts[stage % len(self.counts)] if self.counts else 0

    def selected_layers(self, stage: int, layers: Sequence[str]) -> tuple[str, ...]:
        """Return the layers of a stage that it applies to, in their order."""
        if not self.applies_to_layers:
            return ()
        if self.names:
            names, patterns = _separate_patterns(self.names)
            return tuple(layer for layer in layers if layer in names or any(fnmatchcase(layer, name) for name in patterns))
        return tuple(layers[: self.num_counted(stage)] if self.counts else layers)


@cache
def _separate_patterns(names: tuple[str, ...]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Separate names of layers from patterns."""
    patterns = tuple(name for name in names if not _WILD.isdisjoint(name))
    return frozenset(names) - frozenset(patterns), patterns


@dataclass(frozen=True, slots=True)
class Residency:
    """Values of `recompute=` and `offload=` together. `recompute` applies to the layers that `offload` does not select.

    Offload of all layers offloads all saved tensors, which for a recomputed layer are its inputs. `segment`: number of consecutive layers
    that are recomputed together, of which only the inputs of the first are saved (Chen et al. 2016).

    >>> both = Residency.parse("full:1", "activations:2")
    >>> both.offloaded_layers(0, ["h.0", "h.1", "h.2", "h.3"]), both.recomputed_layers(0, ["h.0", "h.1", "h.2", "h.3"])
    (('h.0', 'h.1'), ('h.2',))
    """

    recompute: LayerChoice = LayerChoice("recompute")
    offload: LayerChoice = LayerChoice("offload")
    segment: int = 1

    @staticmethod
    @cache
    def parse(recompute: str, offload: str, segment: int = 1) -> Residency:
        """Parse both keys. Raises LayoutError."""
        return Residency(LayerChoice.parse("recompute", recompute), LayerChoice.parse("offload", offload), segment)

    @property
    def is_partial(self) -> bool:
        """Return whether it applies to some layers only."""
        return self.recompute.is_partial or self.offload.is_partial

    def of_stage(self, stage: int) -> Residency:
        """Return the residency of one stage: its own counts of layers.

        >>> str(Residency.parse("full:3/1", "none").of_stage(1).recompute)
        'full:1'
        """
        if len(self.recompute.counts) < 2 and len(self.offload.counts) < 2:
            return self
        return replace(self, recompute=self.recompute.of_stage(stage), offload=self.offload.of_stage(stage))

    @property
    def selects_by_name(self) -> bool:
        """Return whether it selects layers by name."""
        return bool(self.recompute.names or self.offload.names)

    def offloaded_layers(self, stage: int, layers: Sequence[str]) -> tuple[str, ...]:
        """Return the layers of a stage that are offloaded between forward and backward."""
        return self.offload.selected_layers(stage, layers)

    def recomputed_layers(self, stage: int, layers: Sequence[str]) -> tuple[str, ...]:
        """Return the layers of a stage that are recomputed."""
        offloaded = set(self.offloaded_layers(stage, layers)) if self.offload.is_partial else set()
        return self.recompute.selected_layers(stage, [layer for layer in layers if layer not in offloaded])

    def check(self, stages: Sequence[Sequence[str]]) -> None:
        """Check against the layers of every stage.

        Raises:
            LayoutError: a name that none of the model's layers has, more layers than a stage has, or layers that would be both
                offloaded and recomputed.
        """
        all_layers = dict.fromkeys(layer for layers in stages for layer in layers if layer)
        for choice in (self.recompute, self.offload):
            for name in choice.names:
                if name not in all_layers and not any(fnmatchcase(layer, name) for layer in all_layers):
                    has = ", ".join(shorten_names(all_layers)) if all_layers else "none that is numbered"
                    raise LayoutError(f"{choice.key}={choice.kind}:{name}: the model has no such layer; it has {has}")
        keys = " ".join(f"{choice.key}={choice}" for choice in (self.recompute, self.offload) if choice.is_partial)
        for stage, layers in enumerate(stages):
            offloads, recomputes = self._num_offloaded(stage, layers), self.recompute.num_counted(stage)
            if (total := offloads + recomputes) > len(layers):
                counted = f"{offloads} offloaded and {recomputes} others recomputed are {total}" if offloads and recomputes else str(total)
                raise LayoutError(f"{keys}: {counted} layers of stage {stage}, which has {len(layers)}; {self._suggest_counts(stages)}")
            both = (
                set(self.offloaded_layers(stage, layers)) & set(self.recompute.selected_layers(stage, layers))
                if self.recompute.names
                else set()
            )
            if both and self.offload.is_partial:
                names = ", ".join(shorten_names(layer for layer in layers if layer in both))
                raise LayoutError(
                    f"{keys}: {len(both)} of the {len(layers)} layers of stage {stage} would be both offloaded and recomputed ({names}); "
                    "name each in one of them"
                )

    def _num_offloaded(self, stage: int, layers: Sequence[str]) -> int:
        """Number of layers of a stage that `offload` selects, by its counts or names."""
        return (
            self.offload.num_counted(stage) if self.offload.counts else len(self.offloaded_layers(stage, layers)) * self.offload.is_partial
        )

    def _suggest_counts(self, stages: Sequence[Sequence[str]]) -> str:
        """Suggest counts where there are too many: at most as many as each stage has, offloaded ones first."""
        offloaded = [min(self._num_offloaded(stage, layers), len(layers)) for stage, layers in enumerate(stages)]
        pairs = enumerate(zip(stages, offloaded, strict=True))
        recomputed = [min(self.recompute.num_counted(stage), len(layers) - n) for stage, (layers, n) in pairs]
        words = []
        for choice, counts in ((self.offload, offloaded), (self.recompute, recomputed)):
            if choice.counts:
                written = write_counts(counts if len(set(counts)) > 1 else counts[:1])
                words.append(f"{choice.key}={choice.kind}:{written}" if any(counts) else f"{choice.key}=none")
        return f"use at most {' '.join(words)}"


def refuse_cheap(residency: Residency) -> str:
    """Return why cheap operators cannot be recomputed beside what is offloaded; empty where they can, or need not.

    >>> refuse_cheap(Residency.parse("cheap", "all"))
    'recompute=cheap with offload=all is not supported: of one layer either is; use offload=optimizer, offload=all:2 (of the first two layers), or recompute=full'
    """  # noqa: E501
    offload = residency.offload
    if residency.recompute.kind != CHEAP or not offload.applies_to_layers or offload.is_partial:
        return ""
    less = "offload=optimizer" if offload.kind == "all" else "offload=none"
    return (
        f"recompute={residency.recompute} with offload={offload} is not supported: of one layer either is; use {less}, "
        f"offload={offload.kind}:2 (of the first two layers), or recompute=full"
    )


def refuse_segment(residency: Residency, zero: int) -> str:
    """Return why layers cannot be recomputed in segments with a stage of ZeRO; empty where they can, or need not.

    >>> refuse_segment(Residency.parse("none", "none", 2), 0)
    'segment=2 recomputes layers together, and recompute=none recomputes no whole ones; use recompute=full, or leave segment out'
    """
    if residency.segment == 1:
        return ""
    text = f"segment={residency.segment} recomputes layers together"
    if residency.recompute.kind != "full":
        return f"{text}, and recompute={residency.recompute} recomputes no whole ones; use recompute=full, or leave segment out"
    if residency.offload.applies_to_layers:
        return f"{text}, which with offload={residency.offload} is not supported; use offload=none or optimizer, or leave segment out"
    if zero == 3:
        return f"{text}, which with zero=3 is not supported: weights are gathered layer by layer; use zero=2 or less, or leave segment out"
    return ""


def refuse_residency(residency: Residency, zero: int) -> str:
    """Return why a residency is not supported with a stage of ZeRO; empty where it is."""
    return refuse_segment(residency, zero) or refuse_cheap(residency)
