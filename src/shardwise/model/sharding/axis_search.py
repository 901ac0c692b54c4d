"""Beam search along one axis: find the cheapest sharding strategy of every operator, and the placements of variables, by dynamic
programming.

Operators in order; a state is the placements of the values still needed; the `BEAM` cheapest distinct states are retained. It is exact
while there are at most that many. Weights that are read again (layers applied several times) stay in the state, so the beam is then wider.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.errors import LayoutError
from shardwise.model.graph import Operator
from shardwise.model.sharding.axis_problem import AxisProblem, OperatorStrategy
from shardwise.plan.ir.placement import D, Placement, R

BEAM = 24  # number of states
MANY_REUSED_WEIGHTS, BEAM_FACTOR = 4, 4  # this many reused weights widen the beam by this factor


class _SearchPath(NamedTuple):
    """The decisions that led to a state of the search, the last one first."""

    previous: _SearchPath | None
    op: str
    choice: OperatorStrategy
    stored: dict[str, Placement]  # placements of parameters and buffers first read here


def solve_axis(problem: AxisProblem, beam: int = BEAM) -> tuple[dict[str, OperatorStrategy], dict[str, Placement]]:
    """Return the cheapest strategies found, and the placements of parameters and buffers."""
    last: dict[str, int] = {}
    reused: set[str] = set()
    for i, op in enumerate(problem.graph.operators):
        for value in op.inputs:
            if value in last and value in problem.weights:
                reused.add(value)
            last[value] = i
    beam *= BEAM_FACTOR if len(reused) >= MANY_REUSED_WEIGHTS else 1
    State = tuple[float, dict[str, tuple[Placement, ...]], _SearchPath | None]
    states: list[State] = [(0.0, {}, None)]
    for i, op in enumerate(problem.graph.operators):
        last_read = {value for value in op.inputs if last[value] == i}
        choices = [
            (choice, {v: (form,) for v, form in zip(op.outputs, choice.output_placements, strict=True) if last.get(v, -1) > i})
            for choice in problem.strategies(op)
        ]
        best: dict[frozenset[tuple[str, tuple[Placement, ...]]], State] = {}
        for cost, placements_before, path in states:
            for choice, output_placements in choices:
                if not problem.is_worthwhile(op, choice, placements_before):
                    continue
                tried = apply_strategy(problem, op, choice, cost, placements_before)
                if tried is None:
                    continue
                total, placements_after, stored = tried
                for value in last_read:
                    placements_after.pop(value, None)
                placements_after.update(output_placements)
                key = frozenset(placements_after.items())
                if key not in best or total < best[key][0]:
                    best[key] = (total, placements_after, _SearchPath(path, op.name, choice, stored))
        states = sorted(best.values(), key=lambda s: s[0])[:beam]
        if not states:
            raise LayoutError(
                f"{op.site} cannot be computed over {problem.axis}={problem.n}: its inputs are sharded and can neither be gathered "
                f"nor resharded; leave {problem.axis} out"
            )
    chosen: dict[str, OperatorStrategy] = {}
    variable_placements: dict[str, Placement] = {}
    node = states[0][2]
    while node is not None:
        chosen[node.op] = node.choice
        variable_placements.update(node.stored)
        node = node.previous
    return chosen, variable_placements


def apply_strategy(
    problem: AxisProblem, op: Operator, choice: OperatorStrategy, cost: float, placements: dict[str, tuple[Placement, ...]]
) -> tuple[float, dict[str, tuple[Placement, ...]], dict[str, Placement]] | None:
    """Return the state after an operator: (cost, placements, placements of variables first read here); None where there is none."""
    after = dict(placements)
    stored: dict[str, Placement] = {}
    cost += choice.cost_s
    for value, needed in zip(op.inputs, choice.input_placements, strict=True):
        available = after.get(value)
        if available is None:
            available = problem.initial_placements(value)
            if available is None:
                stored_placement = problem.stored_placement(value, needed or R)
                if stored_placement is None:
                    return None
                stored[value], stored_s = stored_placement
                cost += stored_s
                available = (stored_placement[0],) if needed in (None, stored_placement[0]) else (stored_placement[0], needed)
            elif value in problem.state and needed is D and available == (R,):
                available = (R, D)  # its gradient is reduced with all others, whatever this use needs
            after[value] = available
        if needed is None or needed in available:
            continue
        move_s = min(problem.redistribute_s(value, source, needed) for source in available)
        if move_s == float("inf"):
            return None
        cost += move_s
        after[value] = (*available, needed)
    return cost, after, stored
