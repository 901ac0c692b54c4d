"""The search along one axis: a frontier dynamic programme. In: an `AxisProblem`. Out: the cheapest choices, and where variables lie.

Operators in order, states are the forms of the values still needed, the `BEAM` cheapest distinct states are kept. It is exact while the
frontier has at most that many distinct states. Weights that are read again (layers applied several times) stay in it, so that it is wider.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.errors import LayoutError
from weft.model.graph import Operator
from weft.model.sharding.axis_problem import AxisProblem, Choice
from weft.plan.placement import D, Placement, R

BEAM = 24  # states that are kept
MANY_AGAIN, WIDER = 4, 4  # so many weights that are read again ask for a beam so many times as wide


class _Decided(NamedTuple):
    """The decisions that led to a state of the search, the last one first."""

    before: _Decided | None
    op: str
    choice: Choice
    stored: dict[str, Placement]  # parameters and buffers that were met here, as they lie


def solve(problem: AxisProblem, beam: int = BEAM) -> tuple[dict[str, Choice], dict[str, Placement]]:
    """The cheapest choices found, and where parameters and buffers lie."""
    last: dict[str, int] = {}
    again: set[str] = set()
    for i, op in enumerate(problem.graph.operators):
        for value in op.inputs:
            if value in last and value in problem.weights:
                again.add(value)
            last[value] = i
    beam *= WIDER if len(again) >= MANY_AGAIN else 1
    State = tuple[float, dict[str, tuple[Placement, ...]], _Decided | None]
    states: list[State] = [(0.0, {}, None)]
    for i, op in enumerate(problem.graph.operators):
        gone = {value for value in op.inputs if last[value] == i}
        choices = [
            (choice, {v: (form,) for v, form in zip(op.outputs, choice.makes, strict=True) if last.get(v, -1) > i})
            for choice in problem.choices(op)
        ]
        best: dict[frozenset[tuple[str, tuple[Placement, ...]]], State] = {}
        for cost, held, path in states:
            for choice, placements in choices:
                if not problem.worth(op, choice, held):
                    continue
                tried = apply(problem, op, choice, cost, held)
                if tried is None:
                    continue
                total, after, stored = tried
                for value in gone:
                    after.pop(value, None)
                after.update(placements)
                key = frozenset(after.items())
                if key not in best or total < best[key][0]:
                    best[key] = (total, after, _Decided(path, op.name, choice, stored))
        states = sorted(best.values(), key=lambda s: s[0])[:beam]
        if not states:
            raise LayoutError(
                f"{op.site} cannot be computed over {problem.axis}={problem.n}: what it reads lies in pieces that are neither put together "
                f"nor cut otherwise; leave {problem.axis} out"
            )
    chosen: dict[str, Choice] = {}
    placed: dict[str, Placement] = {}
    node = states[0][2]
    while node is not None:
        chosen[node.op] = node.choice
        placed.update(node.stored)
        node = node.before
    return chosen, placed


def apply(
    problem: AxisProblem, op: Operator, choice: Choice, cost: float, held: dict[str, tuple[Placement, ...]]
) -> tuple[float, dict[str, tuple[Placement, ...]], dict[str, Placement]] | None:
    """The state after an operator: (cost, forms that are held, variables that were met here as they lie); None where there is none."""
    after = dict(held)
    stored: dict[str, Placement] = {}
    cost += choice.cost_s
    for value, need in zip(op.inputs, choice.needs, strict=True):
        have = after.get(value)
        if have is None:
            have = problem.start(value)
            if have is None:
                present = problem.place(value, need or R)
                if present is None:
                    return None
                stored[value], extra = present
                cost += extra
                have = (present[0],) if need in (None, present[0]) else (present[0], need)
            elif value in problem.placed and need is D and have == (R,):
                have = (R, D)  # its gradient is summed with all the others, whatever this use needs
            after[value] = have
        if need is None or need in have:
            continue
        price = min(problem.move_s(value, source, need) for source in have)
        if price == float("inf"):
            return None
        cost += price
        after[value] = (*have, need)
    return cost, after, stored
