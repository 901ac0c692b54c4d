"""Seconds of given placements along one axis: operators in order, every value moved where its reader needs a form that is not there.

In: the tables, the choice of every kind, where parameters and buffers lie. Out: `Cost`. Not modelled: overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.plan.ir.placement import Placement, R
from tests.support.placements_oracle.tables import Tables


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one pass over the graph, forward and backward.

    `operators_s`: compute, with collectives in the operators themselves. `moves_s`: redistributions. `states_s`: reading and writing
    parameters, gradients and optimizer states, and the sums of gradients at the end of a step.
    """

    operators_s: float
    moves_s: float
    states_s: float

    @property
    def total(self) -> float:
        return self.operators_s + self.moves_s + self.states_s


def price(tables: Tables, chosen: Sequence[int], stored: Mapping[str, Placement]) -> Cost:
    """The cost of one solution. `stored`: form of every parameter and buffer that is read, whole where it lacks one."""
    graph, moves = tables.axis.graph, tables.moves
    operators_s = moves_s = 0.0
    held: dict[str, frozenset[Placement]] = {}
    for v in graph.variables:
        given = tables.axis.initial_placements(v.value) or (R,)
        held[v.value] = frozenset((stored.get(v.value, given[0]),))
    read = {value for flow in tables.flows for value in flow.values}
    states_s = sum(moves.stored(value, next(iter(held[value]))) for value in tables.axis.state if value in read)
    for op in graph.operators:
        kind = tables.kind_of[op.name]
        choice = tables.kinds[kind].choices[chosen[kind]]
        operators_s += choice.cost_s
        for value, need in zip(op.inputs, choice.input_placements, strict=True):
            if need is not None:
                seconds, held[value] = moves.read(value, held[value], (need,))
                moves_s += seconds
        for value, form in zip(op.outputs, choice.output_placements, strict=True):
            held[value] = frozenset((form,))
    return Cost(operators_s, moves_s, states_s)
