"""Dimensions that are several runs, one behind another, each of which is cut by itself: queries, keys and values of one product, a gate
beside what it gates, the gates of a recurrence.

In: a graph and its factor rules. Out: `Fused`: rules in which such a dimension has a label where it is split, sliced or viewed as several
dimensions, and for every dimension its runs, with how many units of each stay together. Borders are followed from where features are taken
apart, before and behind, until nothing new is met. Where an operator asks that pieces lie in one place (a vocabulary, groups of a
convolution) what is joined with it has no runs, and is put together where it is taken apart. Not modelled: parts put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from weft.model.dims.labels import Dim, by_label, common, meanings
from weft.model.graph import Graph, Operator
from weft.model.joined import Joined
from weft.model.work import operator_flops
from weft.ops import Rule, record_of
from weft.ops.rule import ORDERED, POSITIONAL, Along, Runs

ROUNDS = 6  # of taking dimensions apart, each of which may show others


@dataclass(frozen=True)
class Fused:
    """`rules`: by operator, with labels of runs. `of`: by dimension its runs, each (length, units that stay together). `least`: the
    shortest run of whatever is joined with a dimension: among more ranks none of it is cut so. `labels`: (operator, label) of runs."""

    rules: Mapping[str, Rule | None]
    of: Mapping[Dim, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    least: Mapping[Dim, int] = field(default_factory=dict)
    labels: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, eq=False)
class _Label:
    """One label of an operator: where it lies, and which ranges of it lie there."""

    op: Operator
    name: str
    extent: int
    places: tuple[tuple[Dim, int, Runs], ...]  # with its length
    ends: tuple[int, ...] = ()
    rigid: bool = False  # pieces must lie in one place

    @classmethod
    def of_dims(cls, graph: Graph, op: Operator, name: str, dims: Sequence[Dim], rigid: bool) -> _Label:
        lengths = [graph.tensors[value].shape[dim] for value, dim in dims]
        extent = min(lengths)
        one_run = ((0, extent),)
        return cls(op, name, extent, tuple((dim, length, one_run) for dim, length in zip(dims, lengths, strict=True)), (), rigid)

    @classmethod
    def along(cls, graph: Graph, op: Operator, along: Along) -> _Label:
        values = (*op.inputs, *op.outputs)
        places = tuple(((values[i], dim), graph.tensors[values[i]].shape[dim], runs) for i, dim, runs in along.places)
        return cls(op, along.label, max(stop for *_, runs in places for _, stop in runs), places, along.ends)

    @property
    def carries(self) -> bool:
        """Whether it goes on to what is made."""
        return any(value in self.op.outputs for (value, _), *_ in self.places)

    @cached_property
    def borders(self) -> set[int]:
        """Where it is taken apart by itself."""
        borders = {end for *_, runs in self.places for run in runs for end in run} | set(self.ends)
        return borders - {0, self.extent}

    def read(self, runs: Runs, length: int, ends: set[int]) -> set[int] | None:
        """What borders of a dimension are of the label; None where one lies in the midst of an entry."""
        inner, rest = divmod(length, sum(stop - start for start, stop in runs))
        if rest:
            return None
        borders: set[int] = set()
        begin = 0
        for start, stop in runs:
            inside = [end - begin for end in ends if begin < end < begin + (stop - start) * inner]
            if any(end % inner for end in inside):
                return None
            borders.update(start + end // inner for end in inside)
            begin += (stop - start) * inner
        return borders

    def write(self, runs: Runs, length: int, borders: set[int]) -> set[int]:
        """What the label's borders are of a dimension."""
        inner, begin = length // sum(stop - start for start, stop in runs), 0
        ends: set[int] = set()
        for start, stop in runs:
            ends.update(begin + (border - start) * inner for border in borders if start < border < stop)
            begin += (stop - start) * inner
            ends.add(begin)
        return ends - {length}

    def entries(self, runs: Runs, length: int, ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(number of a run of a dimension, where it begins in the label, its length)."""
        inner = length // sum(stop - start for start, stop in runs)
        begin = 0
        for start, stop in runs:
            for number, (first, last) in enumerate(zip((0, *ends), (*ends, length), strict=True)):
                if begin <= first < begin + (stop - start) * inner:
                    yield number, start + (first - begin) // inner, last - first
            begin += (stop - start) * inner


def fused(graph: Graph) -> Fused:
    """The runs of a graph's features."""
    rules, offered = graph.rules, _offered(graph)
    if not any(along.ends or len(along.places) > 1 for alongs in offered.values() for along in alongs if not along.apart):
        return Fused(rules)
    refused: set[tuple[str, str]] = set()
    chosen: dict[tuple[str, str], Along] = {}
    for _ in range(ROUNDS):
        followed = _Followed(graph, offered, chosen, refused)
        refused |= followed.rigid
        again = {key: along for key, along in {**chosen, **followed.chosen(offered)}.items() if key not in refused}
        if again == chosen and not followed.rigid:
            return followed.result()
        chosen = again
    return Fused(rules)


def _offered(graph: Graph) -> dict[str, tuple[Along, ...]]:
    offers = {}
    for op in graph.operators:
        along, rule = record_of(op).along, graph.rules[op.name]
        if along is not None and rule is not None and op.function is None:
            shapes = ([graph.tensors[v].shape for v in values] for values in (op.inputs, op.outputs))
            offers[op.name] = along(op, *shapes)
    return offers


class _Followed:
    """Borders, followed from where dimensions are taken apart. `chosen`: labels of which an inner dimension is cut; `refused`: (operator,
    label) that have no runs."""

    def __init__(
        self,
        graph: Graph,
        offered: Mapping[str, tuple[Along, ...]],
        chosen: Mapping[tuple[str, str], Along],
        refused: set[tuple[str, str]],
    ) -> None:
        self.graph, self.operators = graph, {op.name: op for op in graph.operators}
        self.alongs = {(name, one.label): one for name, those in offered.items() for one in those if not one.apart} | dict(chosen)
        self.alongs = {key: one for key, one in self.alongs.items() if key not in refused}
        self.rules: dict[str, Rule | None] = dict(graph.rules)
        for (name, _), one in self.alongs.items():
            rule = self.rules[name]
            self.rules[name] = None if rule is None else one.rule(rule)
        self.means = meanings(graph, self.rules)
        self.labels = list(self._labels())
        self.broken: set[_Label] = set()
        self.ends: dict[Dim, set[int]] = {}
        self._follow()
        self.joined = Joined[Dim]()
        for label in self.labels:
            if label not in self.broken and label.places:
                self.joined.add([place for place, *_ in label.places])
        self.rigid = self._rigid()

    def _labels(self) -> Iterator[_Label]:
        """Labels that carry features."""
        graph, rows = self.graph, self.graph.ragged
        for op in graph.operators:
            rule, means = self.rules[op.name], self.means[op.name]
            names = means.features - means.samples
            if rule is None or not names:
                continue
            for name, dims in by_label(op, rule).items():
                if name not in names:
                    continue
                along = self.alongs.get((op.name, name))
                if along is not None:
                    yield _Label.along(graph, op, along)
                    continue
                kernel = rule.kernels.get(name)
                rigid = kernel in ORDERED | POSITIONAL or name in rule.units or op.function is not None or not rows.isdisjoint(dims)
                yield _Label.of_dims(graph, op, name, dims, rigid)

    def _follow(self) -> None:
        readers: dict[Dim, list[_Label]] = {}
        for label in self.labels:
            for place, *_ in label.places:
                readers.setdefault(place, []).append(label)
        waiting = dict.fromkeys(label for label in self.labels if label.borders or any(len(runs) > 1 for *_, runs in label.places))
        while waiting:
            label = next(iter(waiting))
            del waiting[label]
            borders = set(label.borders)
            for place, length, runs in label.places:
                read = label.read(runs, length, self.ends.get(place, set()))
                if read is None:
                    self.broken.add(label)
                    break
                borders |= read
            if label in self.broken:
                continue
            for place, length, runs in label.places:
                more = label.write(runs, length, borders) - self.ends.setdefault(place, set())
                if more:
                    self.ends[place] |= more
                    waiting.update(dict.fromkeys(one for one in readers[place] if one is not label and one not in self.broken))

    def _rigid(self) -> set[tuple[str, str]]:
        """Labels that have no runs, since something that is joined with them must lie in one place."""
        roots = {
            self.joined.root(place) for one in self.labels if one.rigid and one not in self.broken for place, *_ in one.places
            if self.ends.get(place)
        }  # fmt: skip
        return {
            (one.op.name, one.name)
            for one in self.labels
            if (one.op.name, one.name) in self.alongs and any(self.joined.root(place) in roots for place, *_ in one.places)
        }

    def chosen(self, offered: Mapping[str, tuple[Along, ...]]) -> dict[tuple[str, str], Along]:
        """Of reshapes whose outer dimensions are taken apart, entry by entry, the inner label."""
        choices = {}
        for name, alongs in offered.items():
            op = self.operators[name]
            values = (*op.inputs, *op.outputs)
            for along in alongs:
                dims = [(values[i], dim) for i, dim in along.apart]
                if dims and all(len(self.ends.get(place, ())) == self.graph.tensors[place[0]].shape[place[1]] - 1 for place in dims):
                    choices[name, along.label] = along
        return choices

    def result(self) -> Fused:
        """What was found."""
        fused = {self.joined.root(place) for place, ends in self.ends.items() if ends}
        fused |= {self.joined.root(one.places[0][0]) for one in self.labels if (one.op.name, one.name) in self.alongs and one.carries}
        mine = [one for one in self.labels if one not in self.broken and self.joined.root(one.places[0][0]) in fused]
        lengths = {place: self._lengths(place, length) for one in mine for place, length, _ in one.places}
        least: dict[Dim, int] = {}
        for several in (True, False):  # what is one run may be shorter, and is then not cut by itself
            for place, sizes in lengths.items():
                root = self.joined.root(place)
                if several == (len(sizes) > 1) and (several or root not in least):
                    least[root] = min(least.get(root, sizes[0]), *sizes)
        units = self._units(mine)
        of = {place: tuple((size, units[place, k]) for k, size in enumerate(sizes)) for place, sizes in lengths.items()}
        return Fused(self._rules(mine), of, {place: least[self.joined.root(place)] for place in of}, self._with_runs(mine))

    def _lengths(self, place: Dim, length: int) -> list[int]:
        ends = sorted(self.ends.get(place, ()))
        return [b - a for a, b in zip((0, *ends), (*ends, length), strict=True)]

    def _with_runs(self, labels: Sequence[_Label]) -> frozenset[tuple[str, str]]:
        """(operator, label) that are cut in runs: those that carry on to what is made."""
        carried = {(one.op.name, one.name) for one in labels if one.carries}
        return frozenset(carried & self.alongs.keys())

    def _rules(self, labels: Sequence[_Label]) -> dict[str, Rule | None]:
        """Rules with the labels that have runs, and without those that meet borders in the midst of an entry."""
        rules = dict(self.graph.rules)
        for name, label in self._with_runs(labels):
            rule = rules[name]
            rules[name] = None if rule is None else self.alongs[name, label].rule(rule)
        for one in self.broken:
            rule = rules[one.op.name]
            if rule is not None and (one.op.name, one.name) not in self.alongs:
                rules[one.op.name] = Along(one.name, ()).rule(rule)
        return rules

    def _units(self, labels: Sequence[_Label]) -> dict[tuple[Dim, int], int]:
        """Into how many units each run can be cut so that the same cut goes through all that share it, as `granules` says it of whole
        dimensions."""
        joined = Joined[tuple[Dim, int]]()
        said: list[tuple[tuple[Dim, int], bool, int]] = []
        for one in labels:
            multiplies = operator_flops(one.op, self.graph.tensors) > 0
            by_start: dict[int, list[tuple[Dim, int]]] = {}
            for place, length, runs in one.places:
                for number, start, size in one.entries(runs, length, sorted(self.ends.get(place, ()))):
                    by_start.setdefault(start, []).append((place, number))
                    said.append(((place, number), multiplies, size))
            for those in by_start.values():
                joined.add(those)
        return common(joined, said)
