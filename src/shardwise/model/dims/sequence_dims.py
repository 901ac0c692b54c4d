"""Dimensions that are positions of a sequence, and their arrangement, for context parallelism.

Propagated through the factor rules, forward and backward, from where positions are evident: queries and keys of attention, also where it is
written as a softmax between two products; time steps of a recurrence; token numbers. A reshape may merge samples and positions and split
them again. Not modeled: positions split into groups, after which nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardwise.model.dims.expert_rows import expert_row_dims
from shardwise.model.dims.labels import dims_with_label, labeled_tensors, ruled_operators
from shardwise.model.graph import Graph, Operator
from shardwise.model.work import operator_flops, values_following_batch
from shardwise.ops import Rule, is_random, record_of
from shardwise.ops.attention import attention_mask_of, heads_label, is_causal
from shardwise.ops.rule import HALO, KEYS, QUERIES
from shardwise.ops.vocabulary import MaskPredicate, ViewKind

ValueDim = tuple[str, int]  # value, dimension


@dataclass(frozen=True, slots=True)
class PositionRun:
    """A dimension that is runs of `size` positions with `inner` entries each; one run where it holds nothing else."""

    size: int
    inner: int = 1

    @property
    def length(self) -> int:
        return self.size * self.inner


def position_after_reshape(source: tuple[int, ...], dim: int, run: PositionRun, target: tuple[int, ...]) -> tuple[int, PositionRun] | None:
    """Return (dimension, run) of positions after a reshape; None where they are split.

    >>> position_after_reshape((4, 8, 6), 1, PositionRun(8), (32, 6)), position_after_reshape((32, 6), 0, PositionRun(8), (4, 8, 2, 3)), position_after_reshape((4, 8), 1, PositionRun(8), (4, 2, 4))
    ((0, PositionRun(size=8, inner=1)), (1, PositionRun(size=8, inner=1)), None)
    """  # noqa: E501
    inner_size = prod(source[dim + 1 :])
    if not prod(source):
        return None  # no entries, which have no positions
    step, extent, target_stride = run.inner * inner_size, run.length * inner_size, 1
    for at in reversed(range(len(target))):
        if target_stride <= step and extent <= target_stride * target[at]:
            if step % target_stride or (target_stride * target[at]) % extent:
                return None
            return at, PositionRun(run.size, step // target_stride)
        target_stride *= target[at]
    return None


def find_sequence_dims(graph: Graph, rules: Mapping[str, Rule | None]) -> dict[ValueDim, PositionRun]:
    """Return, by (value, dimension), the arrangement of sequence positions; other dimensions are left out."""
    users: dict[str, list[Operator]] = {}
    for op in graph.operators:
        for value in dict.fromkeys((*op.inputs, *op.outputs)):
            users.setdefault(value, []).append(op)
    samples = _propagate_positions(graph, rules, users, ((v.value, 0) for v in graph.inputs if v.batched))
    return _propagate_positions(graph, rules, users, _seed_positions(graph, rules, samples))


def _propagate_positions(
    graph: Graph, rules: Mapping[str, Rule | None], users: Mapping[str, Sequence[Operator]], seeds: Iterable[ValueDim]
) -> dict[ValueDim, PositionRun]:
    """Return dimensions with the same positions as the seeds, which are one run each. Rows of experts are excluded."""
    runs: dict[ValueDim, PositionRun] = {}
    rows = expert_row_dims(graph, rules)
    waiting = [(place, PositionRun(graph.tensors[place[0]].shape[place[1]])) for place in seeds]
    while waiting:
        place, run = waiting.pop()
        if place in runs or place in rows or run.size < 2:
            continue
        runs[place] = run
        for op in users.get(place[0], ()):
            waiting += _neighbor_positions(graph, op, rules[op.name], place, run)
    return runs


def _neighbor_positions(
    graph: Graph, op: Operator, rule: Rule | None, place: ValueDim, run: PositionRun
) -> Iterator[tuple[ValueDim, PositionRun]]:
    """Yield dimensions of an operator's other tensors that have the same positions."""
    if rule is None:
        return
    shapes = {value: graph.tensors[value].shape for value in (*op.inputs, *op.outputs)}
    if record_of(op).view.kind == ViewKind.RESHAPE:
        counterparts = op.outputs if place[0] == op.inputs[0] else op.inputs[:1] if place[0] in op.outputs else ()
        for value in counterparts:
            if (target := position_after_reshape(shapes[place[0]], place[1], run, shapes[value])) is not None:
                yield (value, target[0]), target[1]
        return
    length = shapes[place[0]][place[1]]
    for label in {row[place[1]] for value, row in labeled_tensors(op, rule) if value == place[0] and row[place[1]]}:
        for value, row in labeled_tensors(op, rule):
            for dim in (dim for dim, row_label in enumerate(row) if row_label == label):
                if shapes[value][dim] == length:
                    yield (value, dim), run
                elif rule.kernels.get(label) == HALO and run == PositionRun(length):
                    yield (value, dim), PositionRun(shapes[value][dim])


def can_use_ring_attention(rules: Mapping[str, Rule | None]) -> bool:
    """Return whether any attention supports ring attention: one that is a single operator."""
    return any(rule is not None and QUERIES in rule.kernels.values() for rule in rules.values())


def head_dims(graph: Graph, rules: Mapping[str, Rule | None]) -> set[ValueDim]:
    """Return dimensions that are heads of attention, of its inputs and outputs."""
    places = set[ValueDim]()
    for op, rule in ruled_operators(graph, rules):
        if label := heads_label(rule):
            places.update(dims_with_label(op, rule, label))
    return places


def reshaped_positions(op: Operator, graph: Graph, runs: Mapping[ValueDim, PositionRun]) -> Iterator[tuple[int, int]]:
    """Yield (input dimension, output dimension) of positions through a reshape."""
    source, target = graph.tensors[op.inputs[0]].shape, graph.tensors[op.outputs[0]].shape
    for dim in range(len(source)):
        run = runs.get((op.inputs[0], dim))
        target_run = None if run is None else position_after_reshape(source, dim, run, target)
        if target_run is not None and runs.get((op.outputs[0], target_run[0])) == target_run[1]:  # two are not both sharded
            yield dim, target_run[0]


def can_use_zigzag(graph: Graph, rules: Mapping[str, Rule | None], runs: Mapping[ValueDim, PositionRun]) -> bool:
    """Return whether ranks may and should have positions in zigzag order: attention is causal, no draw depends on positions, and no window
    slides over positions of floating-point values (others are read in full)."""
    causal = {op.name: rules[op.name] for op in graph.operators if is_causally_masked(graph, op)}
    if any(is_random(op) for op in graph.operators) or not can_use_ring_attention(causal):
        return False
    return not any(
        rule.kernels.get(label) == HALO and graph.tensors[op.outputs[0]].is_float and (value, dim) in runs
        for op, rule in ruled_operators(graph, rules)
        for value, row in labeled_tensors(op, rule)
        for dim, label in enumerate(row)
    )


def _seed_positions(graph: Graph, rules: Mapping[str, Rule | None], samples: Mapping[ValueDim, PositionRun]) -> Iterator[ValueDim]:
    """Yield dimensions that are evidently positions. `samples`: dimensions known to be samples."""
    follows, weights = values_following_batch(graph), {v.value for v in graph.parameters}
    for op, rule in ruled_operators(graph, rules):
        record = record_of(op)
        for value, row in labeled_tensors(op, rule):
            yield from ((value, dim) for dim, label in enumerate(row) if rule.kernels.get(label) in (QUERIES, KEYS))
        if record.over_steps:
            yield op.inputs[0], (rule.inputs[0] or ("",)).index("")  # steps are not sharded, and samples are
        if record.product.is_lookup and op.inputs[1] in follows:
            dims = range(len(graph.tensors[op.inputs[1]].shape))
            of_samples = [dim for dim in dims if (op.inputs[1], dim) in samples] or [0]
            yield from ((op.inputs[1], dim) for dim in dims if dim not in of_samples)
        if record.output.is_probability and op.inputs[0] in follows:
            yield from _score_positions(graph, rules, weights, op)


def _score_positions(graph: Graph, rules: Mapping[str, Rule | None], weights: set[str], op: Operator) -> Iterator[ValueDim]:
    """Yield queries and keys of attention written out: the softmax is over a dimension of the second operand of a product without weights;
    dimensions of the first operand only are queries."""
    row = (rules[op.name] or Rule((), ())).inputs[0] or ()
    blocked = [dim for dim, label in enumerate(row) if not label and graph.tensors[op.inputs[0]].shape[dim] > 1]
    for dim in blocked:
        value, at = op.inputs[0], dim
        while (maker := graph.producers.get(value)) is not None:
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


LATER, EARLIER = "later", "earlier"


def is_causally_masked(graph: Graph, op: Operator) -> bool:
    """Return whether attention is causal, by its flag or by its mask."""
    mask = attention_mask_of(op)
    return is_causal(op) or (mask is not None and _hidden_keys(graph, mask, True) == {LATER})


def _hidden_keys(graph: Graph, value: str, holds: bool) -> set[str]:
    """Return which keys a mask [..., queries, keys] hides by position (`LATER`, `EARLIER`); `holds`: the value of the mask at visible
    keys."""
    op = graph.producers.get(value)
    if op is None or not op.inputs:
        return set()
    predicate = record_of(op).output.mask
    if predicate in (MaskPredicate.LESS, MaskPredicate.GREATER):
        first, second = op.inputs[0], op.inputs[-1]
        for keys, queries, at_most in (
            (first, second, predicate == MaskPredicate.LESS),
            (second, first, predicate == MaskPredicate.GREATER),
        ):
            if _is_positions_along(graph, keys, -1) and _is_positions_along(graph, queries, -2):
                return {LATER if at_most == holds else EARLIER}
        return set()
    if predicate == MaskPredicate.AND:
        return {hidden for v in op.inputs if holds for hidden in _hidden_keys(graph, v, True)}
    if predicate == MaskPredicate.MASKED_FILL:  # fills scores where the second operand is true
        return _hidden_keys(graph, op.inputs[0], holds) | _hidden_keys(graph, op.inputs[1], not holds)
    if predicate == MaskPredicate.LOWER_TRIANGLE:
        return {LATER} if holds else {EARLIER}
    return _hidden_keys(graph, op.inputs[0], holds != (predicate == MaskPredicate.NOT)) if len(op.inputs) == 1 else set()


def _is_positions_along(graph: Graph, value: str, dim: int) -> bool:
    """Return whether a value is positions along one of the last two dimensions."""
    shape = graph.tensors[value].shape
    other = -3 - dim
    alone = len(shape) >= -dim and shape[dim] > 1 and (len(shape) < -other or shape[other] == 1)
    return alone and _is_counting(graph, value)


def _is_counting(graph: Graph, value: str) -> bool:
    """Return whether a value is computed from consecutive numbers only."""
    op = graph.producers.get(value)
    return op is not None and (
        record_of(op).output.mask == MaskPredicate.ARANGE or (bool(op.inputs) and all(_is_counting(graph, v) for v in op.inputs))
    )
