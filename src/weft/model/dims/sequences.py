"""Dimensions that are positions of a sequence, and their arrangement, for context parallelism.

Propagated through the factor rules, forward and backward, from where positions are evident: queries and keys of attention, also where it is
written as a softmax between two products; time steps of a recurrence; token numbers. A reshape may merge samples and positions and split
them again. Not modeled: positions split into groups, after which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from weft.model.dims.causal import hides_later
from weft.model.dims.labels import labelled, places_of
from weft.model.dims.rows import ragged
from weft.model.graph import Graph, Operator
from weft.model.work import batched, operator_flops
from weft.ops import Rule, draws, record_of
from weft.ops.attention import heads_of
from weft.ops.rule import HALO, KEYS, QUERIES

Place = tuple[str, int]  # value, dimension


@dataclass(frozen=True, slots=True)
class Run:
    """A dimension that is runs of `size` positions with `inner` entries each; one run where it holds nothing else."""

    size: int
    inner: int = 1

    @property
    def length(self) -> int:
        return self.size * self.inner


def reshaped(source: tuple[int, ...], dim: int, run: Run, target: tuple[int, ...]) -> tuple[int, Run] | None:
    """Return (dimension, run) of positions after a reshape; None where they are split.

    >>> reshaped((4, 8, 6), 1, Run(8), (32, 6)), reshaped((32, 6), 0, Run(8), (4, 8, 2, 3)), reshaped((4, 8), 1, Run(8), (4, 2, 4))
    ((0, Run(size=8, inner=1)), (1, Run(size=8, inner=1)), None)
    """
    inner_size = prod(source[dim + 1 :])
    step, extent, target_stride = run.inner * inner_size, run.length * inner_size, 1
    for at in reversed(range(len(target))):
        if target_stride <= step and extent <= target_stride * target[at]:
            if step % target_stride or (target_stride * target[at]) % extent:
                return None
            return at, Run(run.size, step // target_stride)
        target_stride *= target[at]
    return None


def sequences(graph: Graph, rules: Mapping[str, Rule | None]) -> dict[Place, Run]:
    """Return, by (value, dimension), the arrangement of sequence positions; other dimensions are left out."""
    users: dict[str, list[Operator]] = {}
    for op in graph.operators:
        for value in dict.fromkeys((*op.inputs, *op.outputs)):
            users.setdefault(value, []).append(op)
    samples = _followed(graph, rules, users, ((v.value, 0) for v in graph.inputs if v.batched))
    return _followed(graph, rules, users, _seeds(graph, rules, samples))


def _followed(
    graph: Graph, rules: Mapping[str, Rule | None], users: Mapping[str, Sequence[Operator]], seeds: Iterable[Place]
) -> dict[Place, Run]:
    """Return dimensions with the same positions as the seeds, which are one run each. Rows of experts are excluded."""
    runs: dict[Place, Run] = {}
    rows = ragged(graph, rules)
    waiting = [(place, Run(graph.tensors[place[0]].shape[place[1]])) for place in seeds]
    while waiting:
        place, run = waiting.pop()
        if place in runs or place in rows or run.size < 2:
            continue
        runs[place] = run
        for op in users.get(place[0], ()):
            waiting += _beside(graph, op, rules[op.name], place, run)
    return runs


def _beside(graph: Graph, op: Operator, rule: Rule | None, place: Place, run: Run) -> Iterator[tuple[Place, Run]]:
    """Yield dimensions of an operator's other tensors that have the same positions."""
    if rule is None:
        return
    shapes = {value: graph.tensors[value].shape for value in (*op.inputs, *op.outputs)}
    if record_of(op).moves == "reshape":
        counterparts = op.outputs if place[0] == op.inputs[0] else op.inputs[:1] if place[0] in op.outputs else ()
        for value in counterparts:
            if (target := reshaped(shapes[place[0]], place[1], run, shapes[value])) is not None:
                yield (value, target[0]), target[1]
        return
    length = shapes[place[0]][place[1]]
    for label in {row[place[1]] for value, row in labelled(op, rule) if value == place[0] and row[place[1]]}:
        for value, row in labelled(op, rule):
            for dim in (dim for dim, row_label in enumerate(row) if row_label == label):
                if shapes[value][dim] == length:
                    yield (value, dim), run
                elif rule.kernels.get(label) == HALO and run == Run(length):
                    yield (value, dim), Run(shapes[value][dim])


def passes_round(rules: Mapping[str, Rule | None]) -> bool:
    """Return whether any attention supports ring attention: one that is a single operator."""
    return any(rule is not None and QUERIES in rule.kernels.values() for rule in rules.values())


def heads(graph: Graph, rules: Mapping[str, Rule | None]) -> set[Place]:
    """Return dimensions that are heads of attention, of its inputs and outputs."""
    places = set[Place]()
    for op in graph.operators:
        rule = rules[op.name]
        if rule is not None and (label := heads_of(rule)):
            places.update(places_of(op, rule, label))
    return places


def reshapes(op: Operator, graph: Graph, runs: Mapping[Place, Run]) -> Iterator[tuple[int, int]]:
    """Yield (input dimension, output dimension) of positions through a reshape."""
    source, target = graph.tensors[op.inputs[0]].shape, graph.tensors[op.outputs[0]].shape
    for dim in range(len(source)):
        run = runs.get((op.inputs[0], dim))
        target_run = None if run is None else reshaped(source, dim, run, target)
        if target_run is not None and runs.get((op.outputs[0], target_run[0])) == target_run[1]:  # two are not both sharded
            yield dim, target_run[0]


def in_zigzag(graph: Graph, rules: Mapping[str, Rule | None], runs: Mapping[Place, Run]) -> bool:
    """Return whether ranks may and should have positions in zigzag order: attention is causal, no draw depends on positions, and no window
    slides over positions of floating-point values (others are read in full)."""
    makers = graph.producer()
    causal = {op.name: rules[op.name] for op in graph.operators if hides_later(graph, makers, op)}
    if any(draws(op) for op in graph.operators) or not passes_round(causal):
        return False
    for op in graph.operators:
        rule = rules[op.name]
        slides = {x for x, kernel in rule.kernels.items() if kernel == HALO} if rule is not None else set()
        if rule is None or not slides or not graph.tensors[op.outputs[0]].is_float:
            continue
        if any(label in slides and (value, dim) in runs for value, row in labelled(op, rule) for dim, label in enumerate(row)):
            return False
    return True


def _seeds(graph: Graph, rules: Mapping[str, Rule | None], samples: Mapping[Place, Run]) -> Iterator[Place]:
    """Yield dimensions that are evidently positions. `samples`: dimensions known to be samples."""
    follows, makers = batched(graph), {value: op for op in graph.operators for value in op.outputs}
    weights = {v.value for v in graph.parameters}
    for op in graph.operators:
        rule, record = rules[op.name], record_of(op)
        if rule is None:
            continue
        for value, row in labelled(op, rule):
            yield from ((value, dim) for dim, label in enumerate(row) if rule.kernels.get(label) in (QUERIES, KEYS))
        if record.over_steps:
            yield op.inputs[0], (rule.inputs[0] or ("",)).index("")  # steps are not sharded, and samples are
        if record.looks_up and op.inputs[1] in follows:
            dims = range(len(graph.tensors[op.inputs[1]].shape))
            of_samples = [dim for dim in dims if (op.inputs[1], dim) in samples] or [0]
            yield from ((op.inputs[1], dim) for dim in dims if dim not in of_samples)
        if record.normalises and op.inputs[0] in follows:
            yield from _scores(graph, rules, makers, weights, op)


def _scores(
    graph: Graph, rules: Mapping[str, Rule | None], makers: Mapping[str, Operator], weights: set[str], op: Operator
) -> Iterator[Place]:
    """Yield queries and keys of attention written out: the softmax is over a dimension of the second operand of a product without weights;
    dimensions of the first operand only are queries."""
    row = (rules[op.name] or Rule((), ())).inputs[0] or ()
    blocked = [dim for dim, label in enumerate(row) if not label and graph.tensors[op.inputs[0]].shape[dim] > 1]
    for dim in blocked:
        value, at = op.inputs[0], dim
        while (maker := makers.get(value)) is not None:
            rule = rules[maker.name]
            labels = None if rule is None else rule.outputs[maker.outputs.index(value)]
            if rule is None or labels is None or not labels[at]:
                break
            if operator_flops(maker, graph.tensors) > 0:
                rows = [set(r or ()) for r in rule.inputs[:2]]
                if len(rows) == 2 and not weights.intersection(maker.inputs) and labels[at] in rows[1] - rows[0]:
                    yield value, at
                    yield from ((value, d) for d, label in enumerate(labels) if label and label in rows[0] - rows[1])
                break
            value, at = next(
                ((v, r.index(labels[at])) for v, r in zip(maker.inputs, rule.inputs, strict=True) if r is not None and labels[at] in r),
                ("", 0),
            )
