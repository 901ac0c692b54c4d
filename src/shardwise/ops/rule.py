"""Factor rules: how an operator can be sharded, and the notation for them.

A rule gives every dimension of an operator's tensors a label. To shard a label over a mesh axis is to parallelize the operator:

    linear: "b* i, o i, o -> b* o"

Shard `b` for data parallelism, `o` for column parallelism; with `i` sharded, every rank holds a partial sum of the output. Notation: one
entry per tensor argument, `->`, one entry per output. `b*` stands for all remaining dimensions. `!x` cannot be sharded. A mark after a
label says that sharding it needs more than the same operator on a smaller tensor:

    x/  the output is a mean over x                  x^  vocabulary: look-ups and softmax over a sharded class dimension
    x+  statistics over x (batch norm)               x~  windows slide along x: a rank reads its neighbors' halos
    x@  queries of attention (ranks know positions)  x&  keys of attention
    x?  an optional dimension (broadcast if missing)
    _   any placement will do, the values are not read
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

HALO, QUERIES, KEYS = "halo", "queries", "keys"


@dataclass(frozen=True, slots=True)
class LabelKernel:
    """What sharding a label requires (`Rule.kernels`), and its properties.

    `mark`: in the notation. `is_positional`: the label is positions, which feature and sample axes do not shard. `is_ordered`: the kernel
    needs the offset of a rank's one contiguous shard, so that shards are in rank order. `mixes_samples`: it combines shards; for samples,
    microbatches too. `spans_axes`: it communicates along several axes, one after another.
    """

    name: str
    mark: str = ""
    is_positional: bool = False
    is_ordered: bool = False
    mixes_samples: bool = False
    spans_axes: bool = False


KERNELS = {
    kernel.name: kernel
    for kernel in (
        LabelKernel("average", "/", spans_axes=True),
        LabelKernel("summands", spans_axes=True),
        LabelKernel("statistics", "+", mixes_samples=True, spans_axes=True),
        LabelKernel("vocabulary", "^", is_ordered=True),
        LabelKernel("counted", is_ordered=True, mixes_samples=True),
        LabelKernel("running", is_ordered=True, mixes_samples=True),
        LabelKernel("extreme"),
        LabelKernel("apart"),
        LabelKernel("groups"),
        LabelKernel(HALO, "~", is_positional=True),
        LabelKernel(QUERIES, "@", is_positional=True),
        LabelKernel(KEYS, "&", is_positional=True),
    )
}
MARKS = {kernel.mark: name for name, kernel in KERNELS.items() if kernel.mark}
POSITIONAL = frozenset(name for name, kernel in KERNELS.items() if kernel.is_positional)
ORDERED = frozenset(name for name, kernel in KERNELS.items() if kernel.is_ordered)
SAMPLE_MIXING = frozenset(name for name, kernel in KERNELS.items() if kernel.mixes_samples)
MULTI_AXIS = frozenset(name for name, kernel in KERNELS.items() if kernel.spans_axes)
BLOCKED = ""  # a dimension without a label is not sharded
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """Labels of every tensor input (in the order of `Operator.inputs`; None = any placement) and output.

    `kernels`: label -> name of the kernel that sharding it needs. A label of an input that is in no output is contracted: sharding it
    leaves a partial sum. `num_units`: label -> number of indivisible parts of its dimensions.
    """

    inputs: tuple[Labels | None, ...]
    outputs: tuple[Labels, ...]
    kernels: Mapping[str, str] = field(default_factory=dict)
    num_units: Mapping[str, int] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that can be sharded, in order of appearance."""
        labels_seen = [x for labels in (*self.outputs, *(i for i in self.inputs if i is not None)) for x in labels if x]
        return tuple(dict.fromkeys(labels_seen))


LabelRanges = tuple[tuple[int, int], ...]  # ranges (start, stop) of a label's entries, consecutive in a dimension


@dataclass(frozen=True, slots=True)
class FusedLabel:
    """A label of fused dimensions, which consist of runs: queries, keys and values in one projection's output.

    `dims`: (tensor number, inputs before outputs; dimension; ranges of the label there, consecutive, each entry repeated as often as makes
    up the dimension's length). `extra_borders`: further positions at which the label is split. `split_dims`: (tensor, dimension) that must
    be split entry by entry for this label to be the one that is sharded. A label with dimensions in inputs only gives borders and is never
    sharded.
    """

    label: str
    dims: tuple[tuple[int, int, LabelRanges], ...]
    extra_borders: tuple[int, ...] = ()
    split_dims: tuple[tuple[int, int], ...] = ()

    def apply_to(self, rule: Rule) -> Rule:
        """Return the rule with this label at these dimensions and nowhere else."""
        rows = [None if row is None else [x if x != self.label else BLOCKED for x in row] for row in (*rule.inputs, *rule.outputs)]
        for number, dim, _ in self.dims:
            row = rows[number]
            if row is not None:
                row[dim] = self.label
        labels_of = [None if row is None else tuple(row) for row in rows]
        num_inputs = len(rule.inputs)
        return Rule(tuple(labels_of[:num_inputs]), tuple(row or () for row in labels_of[num_inputs:]), rule.kernels, rule.num_units)


def parse(text: str, inputs: Sequence[tuple[int, ...] | None], outputs: Sequence[tuple[int, ...]]) -> Rule | None:
    """Parse the notation for tensors of these shapes (None: an omitted argument). Return None where ranks do not fit.

    A dimension of size 1 where others of the same label are larger is broadcast and is not sharded.
    """
    left_side, _, right_side = text.partition("->")
    entries_in, entries_out = ([e.split() for e in side.split(",")] for side in (left_side, right_side))
    kernels: dict[str, str] = {}
    sizes: dict[str, int] = {}

    def labels(entry: list[str], shape: tuple[int, ...]) -> list[str] | None:
        fixed = [word for word in entry if not word.endswith("*")]
        num_free = len(shape) - len(fixed)
        if missing := [word for word in fixed if word.endswith("?")][: max(0, -num_free)]:  # outermost first
            entry, num_free = [word for word in entry if word not in missing], num_free + len(missing)
        if num_free < 0 or (num_free and len(fixed) == len(entry)):
            return None
        parsed: list[str] = []
        for word in entry:
            if word.startswith("!"):
                parsed += [BLOCKED] * (num_free if word.endswith("*") else 1)
                continue
            base = word.rstrip("*?")
            name = base.rstrip("".join(MARKS))
            names = [f"{name}{i - num_free}" for i in range(num_free)] if word.endswith("*") else [name]
            if name != base:
                kernels.update(dict.fromkeys(names, MARKS[base[-1]]))
            parsed += names
        for label, size in zip(parsed, shape, strict=True):
            if label:
                sizes[label] = max(sizes.get(label, 1), size)
        return parsed

    rows: list[list[str] | None] = []
    shapes: list[tuple[int, ...]] = []
    for entry, shape in zip(entries_in, inputs, strict=False):
        if shape is None:
            continue
        row = None if entry == ["_"] else labels(entry, shape)
        if row is None and entry != ["_"]:
            return None
        rows.append(row)
        shapes.append(shape)
    results = []
    for entry, shape in zip(entries_out, outputs, strict=True):
        row = labels(entry, shape)
        if row is None:
            return None
        results.append(row)

    def shardable(row: list[str], shape: tuple[int, ...]) -> Labels:
        fits = (size > 1 and (size == sizes.get(label) or kernels.get(label) == HALO) for label, size in zip(row, shape, strict=True))
        return tuple(label if label and fit else BLOCKED for label, fit in zip(row, fits, strict=True))

    return Rule(
        tuple(None if row is None else shardable(row, shape) for row, shape in zip(rows, shapes, strict=True)),
        tuple(shardable(row, shape) for row, shape in zip(results, outputs, strict=True)),
        kernels,
    )


def shardable_labels(shape: tuple[int, ...], blocked: Container[int] = ()) -> Labels:
    """Return a label for each dimension that can be sharded; those in `blocked` cannot."""
    return tuple(f"d{i}" if size > 1 and i not in blocked else BLOCKED for i, size in enumerate(shape))


def broadcast_labels(labels: Sequence[str], full: tuple[int, ...], shape: tuple[int, ...]) -> Labels:
    """Return labels of a tensor that is broadcast to shape `full`, which has these labels."""
    extra = len(full) - len(shape)
    return tuple(labels[i + extra] if n == full[i + extra] else BLOCKED for i, n in enumerate(shape))


def leading_labels(shape: tuple[int, ...], count: int) -> Labels:
    """Return labels of the first `count` dimensions; the others are not sharded."""
    return shardable_labels(shape, range(count, len(shape)))


def restrict_rule(rule: Rule, allowed: set[str]) -> Rule:
    """Return the rule restricted to these labels."""

    def row(labels: Labels) -> Labels:
        return tuple(x if x in allowed else BLOCKED for x in labels)

    kernels = {x: k for x, k in rule.kernels.items() if x in allowed}
    units = {x: n for x, n in rule.num_units.items() if x in allowed}
    return Rule(tuple(None if i is None else row(i) for i in rule.inputs), tuple(row(o) for o in rule.outputs), kernels, units)
