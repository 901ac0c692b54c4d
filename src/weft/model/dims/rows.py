"""Dimensions that are rows of experts, of data-dependent length (`weft.ops.experts`), and those of them that must be replicated.

Followed through the factor rules from dispatch to combine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.model.dims.labels import Dim, by_label
from weft.model.graph import Graph, Operator
from weft.model.joined import Joined
from weft.ops import Rule, draws, record_of


def ragged(graph: Graph, rules: Mapping[str, Rule | None]) -> frozenset[Dim]:
    """Return (value, dimension) that are rows of experts."""
    dims: set[Dim] = set()
    for op in graph.operators:
        rule, expert_rows = rules[op.name], record_of(op).ragged
        if expert_rows == "begins":
            dims.update((value, 0) for value in op.outputs)
        elif rule is not None and expert_rows != "ends" and dims:
            rows = zip(op.inputs, rule.inputs, strict=True)
            labels = {row[dim] for value, row in rows if row for dim in range(len(row)) if (value, dim) in dims}
            outputs = zip(op.outputs, rule.outputs, strict=True)
            dims.update((value, dim) for value, row in outputs for dim, label in enumerate(row) if label and label in labels)
    return frozenset(dims)


def ordered_rows(graph: Graph, rules: Mapping[str, Rule | None], rows: frozenset[Dim]) -> frozenset[Dim]:
    """Return those of `rows` that are replicated on every rank from dispatch on: an operator needs all of them, or combines them with
    others, or depends on their number. A sum over them needs only partial sums."""
    if not rows:
        return rows
    joined, needed = Joined[Dim](), {(value, dim) for value, dim in rows if value in (*graph.outputs, graph.loss)}
    for op in graph.operators:
        if record_of(op).ragged == "begins":
            joined.add([(value, 0) for value in op.outputs])
        elif not rows.isdisjoint((value, dim) for value in op.inputs for dim in range(len(graph.tensors[value].shape))):
            rule = rules[op.name]
            for places in by_label(op, rule).values() if rule is not None else ():
                joined.add([place for place in places if place in rows])
            needed.update(_needed(graph, op, rule, rows))
    roots = {joined.root(place) for place in needed}
    return frozenset(place for place in rows if joined.root(place) in roots)


def _needed(graph: Graph, op: Operator, rule: Rule | None, rows: frozenset[Dim]) -> Iterator[Dim]:
    """Yield the rows that an operator needs in full."""
    if record_of(op).ragged:
        return
    read = [(value, dim) for value in op.inputs for dim in range(len(graph.tensors[value].shape)) if (value, dim) in rows]
    if rule is None or draws(op):  # a rank's rows are no shard of those of a serial run, so draws would differ
        yield from read
        return
    shardable = {
        label: places for label, places in by_label(op, rule).items()
        if label not in rule.kernels and rows.issuperset(places)
    }  # fmt: skip
    labelled = {place for places in shardable.values() for place in places}
    yield from (place for place in read if place not in labelled)
