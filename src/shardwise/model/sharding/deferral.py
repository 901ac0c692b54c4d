"""Deferred gradient reduction: all-reduce once at the parameter, where operators that all ranks run alike pass partial sums on. Such
operators are read and computed as D along the axis."""

from __future__ import annotations

from collections.abc import Set

from shardwise.model.graph import Graph
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.placement import D, P, Placement, R, has_partial_gradient


def defer_gradient_reductions(
    graph: Graph,
    axis: str,
    grads: Set[str],
    labels: dict[str, dict[str, str]],
    placements: dict[str, dict[str, Placement]],
    input_placements: dict[str, list[dict[str, Placement | None]]],
) -> None:
    """Let partial gradients pass backward through replicated operators, so that they are reduced once, at the parameter.

    A replicated operator whose outputs are needed only as D passes partial sums on: its own inputs become D. Over `data` a shard and a
    partial sum count as well: a slice of D returns a partial sum without a collective, where a slice of R would need one.
    """

    def passes(needed: set[Placement | None]) -> bool:
        return all(form is D or (axis_of(axis).always_shards and (has_partial_gradient(form) or form is P)) for form in needed)

    uses: dict[str, set[Placement | None]] = {}
    final = {graph.loss, *graph.outputs}
    for op in reversed(graph.operators):
        outputs = [value for value in op.outputs if value in grads]
        linear = op.function is None or op.function.has_linear_backward
        passes_partial_sums = linear and all(passes(uses.get(v, set())) and v not in final and placements[v][axis] is R for v in outputs)
        if labels[op.name][axis] == "" and passes_partial_sums and any(v in uses for v in outputs):
            for value in outputs:
                placements[value][axis] = D
            for value, row in zip(op.inputs, input_placements[op.name], strict=True):
                if row[axis] is R and value in grads:
                    row[axis] = D
        for value, row in zip(op.inputs, input_placements[op.name], strict=True):
            if row[axis] is not None:
                uses.setdefault(value, set()).add(row[axis])
