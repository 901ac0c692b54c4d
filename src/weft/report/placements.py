"""Table of operators' placements under a sharding, with repeated layers merged into one row.

A row's pattern is an operator's site in the model with `*` for layer numbers. Listed are operators that read a parameter, multiply
matrices, or communicate; the others take the placements of their inputs without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.model.graph import Graph, Operator
from weft.model.sharding.sharding import Sharding
from weft.model.work import MATMUL_KINDS, differentiable, work
from weft.plan.patterns import pattern_of
from weft.plan.placement import P, Placement, R, is_full, is_owned, is_shard
from weft.report.tables import Table


@dataclass(frozen=True, slots=True)
class Placed:
    """`count` operators at `site` (a pattern): placements of weights and output, and collectives, each in words by axis."""

    site: str
    count: int
    weights: str
    output: str
    forward: str
    backward: str


def placements(graph: Graph, sharding: Sharding) -> tuple[Placed, ...]:
    """Return one entry per pattern and placement, in the order of the model."""
    names = {v.value: v.name for v in (*graph.parameters, *graph.buffers)}
    kinds = {name: done.kind for name, done in work(graph).items()}
    moves: dict[str, list[tuple[str, str, str]]] = {}
    with_gradient = differentiable(graph)
    for move in sharding.moves:
        if sharding.sizes.get(move.axis, 1) > 1:
            moves.setdefault(move.op, []).append((move.axis, move.forward, move.backward if move.value in with_gradient else ""))
    counts: dict[tuple[str, ...], int] = {}
    for op in graph.operators:
        variables = [value for value in dict.fromkeys(op.inputs) if value in names]
        if not variables and kinds[op.name] not in MATMUL_KINDS and not any(f or b for _, f, b in moves.get(op.name, [])):
            continue
        ahead, back = _collectives(moves.get(op.name, []))
        inside = _inside(op, kinds[op.name], sharding)
        weights = _weights(variables, graph, sharding)
        row = (pattern_of(op.site), weights, _output(op, sharding), ", ".join(filter(None, (ahead, inside))), back)
        counts[row] = counts.get(row, 0) + 1
    return tuple(Placed(site, count, weights, out, ahead, back) for (site, weights, out, ahead, back), count in counts.items())


def placements_table(placed: tuple[Placed, ...], sizes: Mapping[str, int]) -> Table:
    """Tabulate placements; without rows where nothing is sharded."""
    axes = [f"{axis}={size}" for axis, size in sizes.items() if size > 1]
    rows = tuple((p.site, f"{p.count}", p.weights, p.output, p.forward, p.backward) for p in placed)
    columns = ("operator", "count", "weights", "output", "communicates, forward", "backward")
    return Table(f"How operators are placed over {' and '.join(axes)}", columns, rows if axes else (), right=(1,))


def _weights(variables: list[str], graph: Graph, sharding: Sharding) -> str:
    """Describe the placement of the largest of an operator's variables; the others have the same."""
    if not variables:
        return ""
    value = max(variables, key=lambda v: graph.tensors[v].size)
    return _form_words(sharding.forms.get(value, {}), sharding.sizes, replicated="whole")


def _inside(op: Operator, kind: str, sharding: Sharding) -> str:
    """Describe the all-reduce before the bias of a sharded product with a replicated result, which is not among the moves."""
    if kind not in ("linear", "convolution"):
        return ""
    replicated = [
        axis
        for axis, size in sharding.sizes.items()
        if size > 1 and sharding.ops[op.name].get(axis) and is_full(sharding.forms[op.outputs[0]].get(axis, R))
    ]
    return ", ".join(f"all-reduce over {axis}, of its result" for axis in replicated)


def _output(op: Operator, sharding: Sharding) -> str:
    return _form_words(sharding.forms.get(op.outputs[0], {}), sharding.sizes, replicated="whole")


def _form_words(forms: Mapping[str, Placement], sizes: Mapping[str, int], replicated: str) -> str:
    words = []
    for axis, size in sizes.items():
        form = forms.get(axis, R)
        if size > 1 and is_shard(form):
            words.append(f"dim {form.dim} by {axis}")
        elif size > 1 and is_owned(form):
            words.append(f"rank {form.rank} of {axis}")
        elif size > 1 and form is P:
            words.append(f"partial sums over {axis}")
    return ", ".join(words) or replicated


def _collectives(moves: list[tuple[str, str, str]]) -> tuple[str, str]:
    """Describe the collectives of forward and backward; moves of no bytes are left out."""
    silent = ("", "slice", "pad")
    ahead = dict.fromkeys(f"{f.replace('_', '-')} over {axis}" for axis, f, _ in moves if f not in silent)
    back = dict.fromkeys(f"{b.replace('_', '-')} over {axis}" for axis, _, b in moves if b not in silent)
    return ", ".join(ahead), ", ".join(back)
