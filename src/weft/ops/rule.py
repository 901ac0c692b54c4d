"""What a factor rule is, and the notation that writes one down.

A rule gives every dimension of an operator's tensors a label. To cut a label over a mesh axis is to parallelise the operator:

    linear: "b* i, o i, o -> b* o"

Cut `b` and the samples are divided, cut `o` and the output features are, cut `i` and every rank holds a summand of the output.
Notation: one entry a tensor argument, `->`, one entry an output. `b*` stands for as many dimensions as are left. `!x` cannot be
cut. A mark behind a label says that cutting it needs more than the same operator on a smaller tensor:

    x/  the output is an average over x              x^  vocabulary: look-ups and softmax over a cut class dimension
    x+  statistics over x (batch norm)               x~  windows slide along x: a rank reads its neighbours' edges
    x@  queries of attention: a rank's know which they are   x&  keys of attention
    x?  a dimension that may be missing, and is then broadcast
    _   any placement will do, the values are not read
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

HALO, QUERIES, KEYS = "halo", "queries", "keys"


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a label is said to need when it is cut, in `Rule.kernels`, and what others ask of that.

    `mark`: in the notation. `positional`: of labels that are positions, which axes that cut features or samples leave alone. `ordered`: it
    asks of a rank where its one piece begins, so that pieces lie in the order of ranks. `mixing`: it takes other pieces into account; of
    samples, other microbatches. `several`: it talks along several axes, one after another.
    """

    name: str
    mark: str = ""
    positional: bool = False
    ordered: bool = False
    mixing: bool = False
    several: bool = False


KERNELS = {
    one.name: one
    for one in (
        Kernel("average", "/", several=True),
        Kernel("summands", several=True),
        Kernel("statistics", "+", mixing=True, several=True),
        Kernel("vocabulary", "^", ordered=True),
        Kernel("counted", ordered=True, mixing=True),
        Kernel("running", ordered=True, mixing=True),
        Kernel("extreme"),
        Kernel("apart"),
        Kernel("groups"),
        Kernel(HALO, "~", positional=True),
        Kernel(QUERIES, "@", positional=True),
        Kernel(KEYS, "&", positional=True),
    )
}
MARKS = {kernel.mark: name for name, kernel in KERNELS.items() if kernel.mark}
POSITIONAL = frozenset(name for name, kernel in KERNELS.items() if kernel.positional)
ORDERED = frozenset(name for name, kernel in KERNELS.items() if kernel.ordered)
MIXING = frozenset(name for name, kernel in KERNELS.items() if kernel.mixing)
SEVERAL = frozenset(name for name, kernel in KERNELS.items() if kernel.several)
BLOCKED = ""  # a dimension without a label stays whole
Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """Labels of every tensor input (in the order of `Operator.inputs`; None = any placement) and output.

    `kernels`: label -> name of the implementation that cutting it needs. A label of an input that is in no output
    is contracted: cutting it leaves a partial sum. `units`: label -> of how many parts, none of which can be cut, its dimensions are.
    """

    inputs: tuple[Labels | None, ...]
    outputs: tuple[Labels, ...]
    kernels: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels that can be cut, in the order of appearance."""
        seen = [x for labels in (*self.outputs, *(i for i in self.inputs if i is not None)) for x in labels if x]
        return tuple(dict.fromkeys(seen))


Runs = tuple[tuple[int, int], ...]  # ranges (start, stop) of what a label counts, one behind the other in a dimension


@dataclass(frozen=True, slots=True)
class Along:
    """A label whose dimensions are runs: of a fused projection's output, queries, keys and values.

    `places`: of tensor number (inputs before outputs) which dimension it is and which ranges of the label lie there, one behind the
    other, each entry of the label as often as makes the dimension as long as it is. `ends`: where else the label is taken apart. `apart`:
    (tensor, dimension) that must be taken apart, entry by entry, for this label to be the one that can be cut. What has places in inputs
    alone says where borders are, and is no label that could be cut.
    """

    label: str
    places: tuple[tuple[int, int, Runs], ...]
    ends: tuple[int, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()

    def rule(self, rule: Rule) -> Rule:
        """A rule in which the label stands at these places, and nowhere else."""
        rows = [None if row is None else [x if x != self.label else BLOCKED for x in row] for row in (*rule.inputs, *rule.outputs)]
        for number, dim, _ in self.places:
            row = rows[number]
            if row is not None:
                row[dim] = self.label
        labels_of = [None if row is None else tuple(row) for row in rows]
        count = len(rule.inputs)
        return Rule(tuple(labels_of[:count]), tuple(row or () for row in labels_of[count:]), rule.kernels, rule.units)


def parse(text: str, inputs: Sequence[tuple[int, ...] | None], outputs: Sequence[tuple[int, ...]]) -> Rule | None:
    """Read the notation for tensors of these shapes (None: an argument that was not given). None where ranks do not fit.

    A dimension of size 1 beside a larger one of the same label is broadcast: it stays whole.
    """
    left, _, right = text.partition("->")
    entries_in, entries_out = ([e.split() for e in side.split(",")] for side in (left, right))
    kernels: dict[str, str] = {}
    sizes: dict[str, int] = {}

    def labels(entry: list[str], shape: tuple[int, ...]) -> list[str] | None:
        fixed = [word for word in entry if not word.endswith("*")]
        spare = len(shape) - len(fixed)
        if absent := [word for word in fixed if word.endswith("?")][: max(0, -spare)]:  # outermost first
            entry, spare = [word for word in entry if word not in absent], spare + len(absent)
        if spare < 0 or (spare and len(fixed) == len(entry)):
            return None
        parsed: list[str] = []
        for word in entry:
            if word.startswith("!"):
                parsed += [BLOCKED] * (spare if word.endswith("*") else 1)
                continue
            base = word.rstrip("*?")
            name = base.rstrip("".join(MARKS))
            names = [f"{name}{i - spare}" for i in range(spare)] if word.endswith("*") else [name]
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

    def cuttable(row: list[str], shape: tuple[int, ...]) -> Labels:
        fits = (size > 1 and (size == sizes.get(label) or kernels.get(label) == HALO) for label, size in zip(row, shape, strict=True))
        return tuple(label if label and fit else BLOCKED for label, fit in zip(row, fits, strict=True))

    return Rule(
        tuple(None if row is None else cuttable(row, shape) for row, shape in zip(rows, shapes, strict=True)),
        tuple(cuttable(row, shape) for row, shape in zip(results, outputs, strict=True)),
        kernels,
    )


def named(shape: tuple[int, ...], blocked: Container[int] = ()) -> Labels:
    """A label for each dimension that can be cut; those in `blocked` cannot."""
    return tuple(f"d{i}" if size > 1 and i not in blocked else BLOCKED for i, size in enumerate(shape))


def lead(shape: tuple[int, ...], count: int) -> Labels:
    """Labels of the first `count` dimensions; the others come whole."""
    return named(shape, range(count, len(shape)))


def only(rule: Rule, keep: set[str]) -> Rule:
    """The rule with no other labels than these."""

    def row(labels: Labels) -> Labels:
        return tuple(x if x in keep else BLOCKED for x in labels)

    kernels = {x: k for x, k in rule.kernels.items() if x in keep}
    units = {x: n for x, n in rule.units.items() if x in keep}
    return Rule(tuple(None if i is None else row(i) for i in rule.inputs), tuple(row(o) for o in rule.outputs), kernels, units)
