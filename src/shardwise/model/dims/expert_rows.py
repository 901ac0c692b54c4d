"""Dimensions that are rows of experts, of data-dependent length (`shardwise.ops.experts`), and those of them that must be replicated.

Followed through the factor rules from dispatch to combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.model.dataflow import cached_on_graph
from shardwise.model.dims.labels import ValueDim, dims_by_label
from shardwise.model.graph import Graph, Operator
from shardwise.model.union_find import UnionFind
from shardwise.ops import Rule, is_random, record_of
from shardwise.ops.vocabulary import LoweringKind


@cached_on_graph
def expert_rows(graph: Graph) -> frozenset[ValueDim]:
    """Return (value, dimension) that are rows of experts by the graph's own rules."""
    return expert_row_dims(graph, graph.rules)


def expert_row_dims(graph: Graph, rules: Mapping[str, Rule | None]) -> frozenset[ValueDim]:
    """Return (value, dimension) that are rows of experts."""
    dims: set[ValueDim] = set()
    for op in graph.operators:
        rule, stage = rules[op.name], record_of(op).expert_stage
        if stage == LoweringKind.EXPERT_DISPATCH:
            dims.update((value, 0) for value in op.outputs)
        elif rule is not None and stage != LoweringKind.EXPERT_COMBINE and dims:
            rows = zip(op.inputs, rule.inputs, strict=True)
            labels = {row[dim] for value, row in rows if row for dim in range(len(row)) if (value, dim) in dims}
            outputs = zip(op.outputs, rule.outputs, strict=True)
            dims.update((value, dim) for value, row in outputs for dim, label in enumerate(row) if label and label in labels)
    return frozenset(dims)


def replicated_expert_rows(graph: Graph, rules: Mapping[str, Rule | None], rows: frozenset[ValueDim]) -> frozenset[ValueDim]:
    """Return those of `rows` that are replicated on every rank from dispatch on: an operator needs all of them, or combines them with
    others, or depends on their number. A sum over them needs only partial sums."""
    if not rows:
        return rows
    joined, needed = UnionFind[ValueDim](), {(value, dim) for value, dim in rows if value in (*graph.outputs, graph.loss)}
    for op in graph.operators:
        if record_of(op).expert_stage == LoweringKind.EXPERT_DISPATCH:
            joined.union([(value, 0) for value in op.outputs])
        elif not rows.isdisjoint((value, dim) for value in op.inputs for dim in range(len(graph.tensors[value].shape))):
            rule = rules[op.name]
            for places in dims_by_label(op, rule).values() if rule is not None else ():
                joined.union([place for place in places if place in rows])
            needed.update(_rows_needed_whole(graph, op, rule, rows))
    roots = {joined.root(place) for place in needed}
    return frozenset(place for place in rows if joined.root(place) in roots)


def _rows_needed_whole(graph: Graph, op: Operator, rule: Rule | None, rows: frozenset[ValueDim]) -> Iterator[ValueDim]:
    """Yield the rows that an operator needs in full."""
    if record_of(op).expert_stage:
        return
    read = [(value, dim) for value in op.inputs for dim in range(len(graph.tensors[value].shape)) if (value, dim) in rows]
    if rule is None or is_random(op):  # a rank's rows are no shard of those of a serial run, so draws would differ
        yield from read
        return
    shardable = {
        label: places for label, places in dims_by_label(op, rule).items()
        if label not in rule.kernels and rows.issuperset(places)
    }  # fmt: skip
    labelled = {place for places in shardable.values() for place in places}
    yield from (place for place in read if place not in labelled)
