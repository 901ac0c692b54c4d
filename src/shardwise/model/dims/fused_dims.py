"""Fused dimensions: several consecutive runs in one dimension, each sharded separately: queries, keys and values of one product, a gate and
its input, the gates of a recurrence.

Returns rules in which such a dimension has a label where it is split, sliced or viewed as several dimensions, and for every dimension its
runs with the number of indivisible units of each. Borders are propagated from where features are split, forward and backward, to a fixed
point. Where an operator needs contiguous shards (a vocabulary, groups of a convolution), dimensions joined with it have no runs, and are
gathered where they are split. Not modeled: concatenation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardwise.model.dataflow import cached_on_graph
from shardwise.model.dims.expert_rows import expert_rows
from shardwise.model.dims.labels import ValueDim, common_divisors, dims_by_label, label_meanings, ruled_operators
from shardwise.model.graph import Graph, Operator
from shardwise.model.union_find import UnionFind
from shardwise.model.work import operator_flops
from shardwise.ops import Rule, record_of
from shardwise.ops.rule import ORDERED, POSITIONAL, FusedLabel, LabelRanges

MAX_ROUNDS = 6  # of splitting dimensions; each round may reveal others


@dataclass(frozen=True)
class FusedDimensions:
    """`rules`: by operator, with labels of runs. `runs_of`: by dimension its runs, each (length, indivisible units). `shortest_run`: the
    shortest run joined with a dimension; with more ranks than that it is not sharded so. `labels`: (operator, label) of runs."""

    rules: Mapping[str, Rule | None]
    runs_of: Mapping[ValueDim, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    shortest_run: Mapping[ValueDim, int] = field(default_factory=dict)
    labels: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, eq=False)
class _FeatureLabel:
    """One label of an operator: its dimensions, and the ranges of it in each."""

    op: Operator
    name: str
    extent: int
    places: tuple[tuple[ValueDim, int, LabelRanges], ...]  # with the dimension's length
    extra_borders: tuple[int, ...] = ()
    is_contiguous: bool = False  # shards must be contiguous

    @classmethod
    def of_dims(cls, graph: Graph, op: Operator, name: str, dims: Sequence[ValueDim], rigid: bool) -> _FeatureLabel:
        lengths = [graph.tensors[value].shape[dim] for value, dim in dims]
        extent = min(lengths)
        one_run = ((0, extent),)
        return cls(op, name, extent, tuple((dim, length, one_run) for dim, length in zip(dims, lengths, strict=True)), (), rigid)

    @classmethod
    def from_fused_label(cls, graph: Graph, op: Operator, along: FusedLabel) -> _FeatureLabel:
        values = (*op.inputs, *op.outputs)
        places = tuple(((values[i], dim), graph.tensors[values[i]].shape[dim], runs) for i, dim, runs in along.dims)
        return cls(op, along.label, max(stop for *_, runs in places for _, stop in runs), places, along.extra_borders)

    @property
    def reaches_output(self) -> bool:
        """Return whether an output has it."""
        return any(value in self.op.outputs for (value, _), *_ in self.places)

    @cached_property
    def borders(self) -> set[int]:
        """Borders at which the label itself is split."""
        borders = {end for *_, runs in self.places for run in runs for end in run} | set(self.extra_borders)
        return borders - {0, self.extent}

    def borders_from_dim(self, runs: LabelRanges, length: int, ends: set[int]) -> set[int] | None:
        """Return the label's borders that follow from a dimension's; None where one falls inside an entry."""
        inner, remainder = divmod(length, sum(stop - start for start, stop in runs))
        if remainder:
            return None
        borders: set[int] = set()
        begin = 0
        for start, stop in runs:
            run_ends = [end - begin for end in ends if begin < end < begin + (stop - start) * inner]
            if any(end % inner for end in run_ends):
                return None
            borders.update(start + end // inner for end in run_ends)
            begin += (stop - start) * inner
        return borders

    def borders_to_dim(self, runs: LabelRanges, length: int, borders: set[int]) -> set[int]:
        """Return a dimension's borders that follow from the label's."""
        inner, begin = length // sum(stop - start for start, stop in runs), 0
        ends: set[int] = set()
        for start, stop in runs:
            ends.update(begin + (border - start) * inner for border in borders if start < border < stop)
            begin += (stop - start) * inner
            ends.add(begin)
        return ends - {length}

    def run_entries(self, runs: LabelRanges, length: int, ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield (number of a run of a dimension, its start in the label, its length)."""
        inner = length // sum(stop - start for start, stop in runs)
        begin = 0
        for start, stop in runs:
            for number, (first, last) in enumerate(zip((0, *ends), (*ends, length), strict=True)):
                if begin <= first < begin + (stop - start) * inner:
                    yield number, start + (first - begin) // inner, last - first
            begin += (stop - start) * inner


@cached_on_graph
def find_fused_dims(graph: Graph) -> FusedDimensions:
    """Return the runs of a graph's features."""
    rules, offered = graph.rules, _candidate_labels(graph)
    if not any(along.extra_borders or len(along.dims) > 1 for alongs in offered.values() for along in alongs if not along.split_dims):
        return FusedDimensions(rules)
    refused: set[tuple[str, str]] = set()
    chosen: dict[tuple[str, str], FusedLabel] = {}
    for _ in range(MAX_ROUNDS):
        followed = _BorderPropagation(graph, offered, chosen, refused)
        refused |= followed.contiguous
        next_chosen = {key: along for key, along in {**chosen, **followed.choose_inner_labels(offered)}.items() if key not in refused}
        if next_chosen == chosen and not followed.contiguous:
            return followed.to_fused_dims()
        chosen = next_chosen
    return FusedDimensions(rules)


def _candidate_labels(graph: Graph) -> dict[str, tuple[FusedLabel, ...]]:
    offers = {}
    for op, _ in ruled_operators(graph, graph.rules):
        along = record_of(op).along
        if along is not None and op.function is None:
            shapes = ([graph.tensors[v].shape for v in values] for values in (op.inputs, op.outputs))
            offers[op.name] = along(op, *shapes)
    return offers


class _BorderPropagation:
    """Propagation of borders from where dimensions are split. `choose_inner_labels`: labels of which an inner dimension is sharded;
    `refused`:
    (operator, label) that have no runs."""

    def __init__(
        self,
        graph: Graph,
        candidates: Mapping[str, tuple[FusedLabel, ...]],
        chosen: Mapping[tuple[str, str], FusedLabel],
        refused: set[tuple[str, str]],
    ) -> None:
        self.graph, self.operators = graph, {op.name: op for op in graph.operators}
        self.fused_labels = {
            (name, along.label): along for name, alongs in candidates.items() for along in alongs if not along.split_dims
        } | dict(chosen)
        self.fused_labels = {key: along for key, along in self.fused_labels.items() if key not in refused}
        self.rules: dict[str, Rule | None] = dict(graph.rules)
        for (name, _), along in self.fused_labels.items():
            rule = self.rules[name]
            self.rules[name] = None if rule is None else along.apply_to(rule)
        self.meaning_of = label_meanings(graph, self.rules)
        self.labels = list(self._labels())
        self.broken: set[_FeatureLabel] = set()
        self.borders: dict[ValueDim, set[int]] = {}
        self._propagate_borders()
        self.union = UnionFind[ValueDim]()
        for label in self.labels:
            if label not in self.broken and label.places:
                self.union.union([place for place, *_ in label.places])
        self.contiguous = self._contiguous_labels()

    def _labels(self) -> Iterator[_FeatureLabel]:
        """Yield labels of features."""
        graph, rows = self.graph, expert_rows(self.graph)
        for op, rule in ruled_operators(graph, self.rules):
            names = self.meaning_of[op.name].features - self.meaning_of[op.name].samples
            for name, dims in dims_by_label(op, rule).items() if names else ():
                if name not in names:
                    continue
                along = self.fused_labels.get((op.name, name))
                if along is not None:
                    yield _FeatureLabel.from_fused_label(graph, op, along)
                    continue
                kernel = rule.kernels.get(name)
                rigid = kernel in ORDERED | POSITIONAL or name in rule.num_units or op.function is not None or not rows.isdisjoint(dims)
                yield _FeatureLabel.of_dims(graph, op, name, dims, rigid)

    def _propagate_borders(self) -> None:
        readers: dict[ValueDim, list[_FeatureLabel]] = {}
        for label in self.labels:
            for place, *_ in label.places:
                readers.setdefault(place, []).append(label)
        waiting = dict.fromkeys(label for label in self.labels if label.borders or any(len(runs) > 1 for *_, runs in label.places))
        while waiting:
            label = next(iter(waiting))
            del waiting[label]
            borders = set(label.borders)
            for place, length, runs in label.places:
                read = label.borders_from_dim(runs, length, self.borders.get(place, set()))
                if read is None:
                    self.broken.add(label)
                    break
                borders |= read
            if label in self.broken:
                continue
            for place, length, runs in label.places:
                new_ends = label.borders_to_dim(runs, length, borders) - self.borders.setdefault(place, set())
                if new_ends:
                    self.borders[place] |= new_ends
                    waiting.update(dict.fromkeys(other for other in readers[place] if other is not label and other not in self.broken))

    def _contiguous_labels(self) -> set[tuple[str, str]]:
        """Return labels that have no runs since a label joined with them needs contiguous shards."""
        roots = {
            self.union.root(place) for label in self.labels if label.is_contiguous and label not in self.broken for place,
                *_ in label.places
            if self.borders.get(place)
        }  # fmt: skip
        return {
            (label.op.name, label.name)
            for label in self.labels
            if (label.op.name, label.name) in self.fused_labels and any(self.union.root(place) in roots for place, *_ in label.places)
        }

    def choose_inner_labels(self, candidates: Mapping[str, tuple[FusedLabel, ...]]) -> dict[tuple[str, str], FusedLabel]:
        """Return, for reshapes whose outer dimensions are split entry by entry, the inner label."""
        choices = {}
        for name, alongs in candidates.items():
            op = self.operators[name]
            values = (*op.inputs, *op.outputs)
            for along in alongs:
                dims = [(values[i], dim) for i, dim in along.split_dims]
                if dims and all(len(self.borders.get(place, ())) == self.graph.tensors[place[0]].shape[place[1]] - 1 for place in dims):
                    choices[name, along.label] = along
        return choices

    def to_fused_dims(self) -> FusedDimensions:
        """Return the fused dimensions found."""
        fused = {self.union.root(place) for place, ends in self.borders.items() if ends}
        in_runs = (label for label in self.labels if (label.op.name, label.name) in self.fused_labels and label.reaches_output)
        fused |= {self.union.root(label.places[0][0]) for label in in_runs}
        fused_labels = [label for label in self.labels if label not in self.broken and self.union.root(label.places[0][0]) in fused]
        lengths = {place: self._lengths(place, length) for label in fused_labels for place, length, _ in label.places}
        least: dict[ValueDim, int] = {}
        for several in (True, False):  # a single run may be shorter; then it is not sharded on its own
            for place, sizes in lengths.items():
                root = self.union.root(place)
                if several == (len(sizes) > 1) and (several or root not in least):
                    least[root] = min(least.get(root, sizes[0]), *sizes)
        units = self._units(fused_labels)
        of = {place: tuple((size, units[place, k]) for k, size in enumerate(sizes)) for place, sizes in lengths.items()}
        return FusedDimensions(
            self._rules(fused_labels), of, {place: least[self.union.root(place)] for place in of}, self._labels_with_runs(fused_labels)
        )

    def _lengths(self, place: ValueDim, length: int) -> list[int]:
        ends = sorted(self.borders.get(place, ()))
        return [b - a for a, b in zip((0, *ends), (*ends, length), strict=True)]

    def _labels_with_runs(self, labels: Sequence[_FeatureLabel]) -> frozenset[tuple[str, str]]:
        """Return (operator, label) that are sharded in runs: those that reach an output."""
        carried = {(label.op.name, label.name) for label in labels if label.reaches_output}
        return frozenset(carried & self.fused_labels.keys())

    def _rules(self, labels: Sequence[_FeatureLabel]) -> dict[str, Rule | None]:
        """Return rules with the labels that have runs, and without those with borders inside an entry."""
        rules = dict(self.graph.rules)
        for name, label in self._labels_with_runs(labels):
            rule = rules[name]
            rules[name] = None if rule is None else self.fused_labels[name, label].apply_to(rule)
        for broken_label in self.broken:
            rule = rules[broken_label.op.name]
            if rule is not None and (broken_label.op.name, broken_label.name) not in self.fused_labels:
                rules[broken_label.op.name] = FusedLabel(broken_label.name, ()).apply_to(rule)
        return rules

    def _units(self, labels: Sequence[_FeatureLabel]) -> dict[tuple[ValueDim, int], int]:
        """Return the number of units of each run that allow a consistent sharding, as `num_units_by_dim` does for entire dimensions."""
        joined = UnionFind[tuple[ValueDim, int]]()
        statements: list[tuple[tuple[ValueDim, int], bool, int]] = []
        for label in labels:
            multiplies = operator_flops(label.op, self.graph.tensors) > 0
            by_start: dict[int, list[tuple[ValueDim, int]]] = {}
            for place, length, runs in label.places:
                for number, start, size in label.run_entries(runs, length, sorted(self.borders.get(place, ()))):
                    by_start.setdefault(start, []).append((place, number))
                    statements.append(((place, number), multiplies, size))
            for runs_here in by_start.values():
                joined.union(runs_here)
        return common_divisors(joined, statements)
