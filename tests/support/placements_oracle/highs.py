"""Solves a `Programme` with HiGHS (Huangfu and Hall 2018). In: columns and rows. Out: values, the cost, and the proven bound.

Needs the package `highspy`. It must never share a process with `ortools`, which carries another HiGHS.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import Infeasible
from tests.support.placements_oracle.engine import IMPOSSIBLE, NOTHING, solve_apart, solve_here
from tests.support.placements_oracle.linear import Programme, Terms

SMALL = 400  # columns below which presolve saves nothing, so that they are solved here without it
SPAN = 1e4  # costs are scaled to about this size, and so are bytes, since the solver's tolerances are absolute
SAME = 1e-7  # costs that differ by less, relatively, are equal: the fewest bytes decide
INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of the columns; seconds of the objective and its proven lower bound."""

    values: tuple[float, ...]
    cost: float
    bound: float
    proven: bool  # the gap asked for was reached before the time limit


def solve(programme: Programme, most_bytes: float, limit_s: float, gap: float, start: Mapping[int, float] | None = None) -> Solution | None:
    """The cheapest solution within `most_bytes`, of equal ones that with the fewest bytes; None where there is none at all.

    Args:
        start: columns of 0 or 1 of a solution that is known, from which the search begins.

    Raises:
        Infeasible: none was found within `limit_s` seconds, though there may be one.
    """
    began = time.perf_counter()
    rows = [] if most_bytes == INFINITE else [(most_bytes - programme.fixed_bytes, programme.bytes)]
    found = _run(programme, programme.costs, rows, limit_s, gap, start or {})
    if found is None or not found.proven or not programme.bytes:
        return found
    left = limit_s - (time.perf_counter() - began)
    within = [*rows, (found.cost * (1 + SAME), [(c, cost) for c, cost in enumerate(programme.costs) if cost])]
    if left <= 0:
        return found
    try:
        thrifty = _run(programme, _costs(programme, programme.bytes), within, left, 1e-3, {})
    except Infeasible:
        return found
    if thrifty is None:
        return found
    cost = sum(a * b for a, b in zip(programme.costs, thrifty.values, strict=True))
    return replace(found, values=thrifty.values, cost=cost) if cost <= found.cost * (1 + 2 * SAME) else found


def least_bytes(programme: Programme, limit_s: float) -> float:
    """The fewest bytes with which any solution exists, to one part in a thousand; infinite where none was found in time."""
    try:
        found = _run(programme, _costs(programme, programme.bytes), [], limit_s, 1e-3, {})
    except Infeasible:
        return INFINITE
    return INFINITE if found is None else found.cost + programme.fixed_bytes


def _costs(programme: Programme, terms: Terms) -> list[float]:
    costs = [0.0] * len(programme.costs)
    for column, by in terms:
        costs[column] += by
    return costs


def _run(
    programme: Programme,
    costs: Sequence[float],
    at_most: Sequence[tuple[float, Terms]],
    limit_s: float,
    gap: float,
    start: Mapping[int, float],
) -> Solution | None:
    """Minimise `costs` under the programme's rows and those of `at_most`."""
    rows = list(programme.rows)
    for most, entries in at_most:
        scale = SPAN / max(most, 1e-12) if most > 0 else 1.0
        rows.append((-INFINITE, most * scale, [(column, by * scale) for column, by in entries]))
    largest = max(costs, default=0.0)
    unit = SPAN / largest if largest > 0 else 1.0
    starts = [0]
    columns: list[int] = []
    coefficients: list[float] = []
    for _, _, entries in rows:
        merged: dict[int, float] = {}
        for column, by in entries:
            merged[column] = merged.get(column, 0.0) + by
        columns += merged
        coefficients += merged.values()
        starts.append(len(columns))
    arrays = {
        "costs": np.array(costs) * unit,
        "lower": np.zeros(len(costs)),
        "upper": np.array(programme.uppers),
        "whole": np.array(programme.whole, dtype=np.int32),
        "least": np.array([least for least, _, _ in rows]),
        "most": np.array([most for _, most, _ in rows]),
        "start": np.array(starts, dtype=np.int32),
        "index": np.array(columns, dtype=np.int32),
        "value": np.array(coefficients, dtype=np.float64),
        "known_index": np.array(list(start), dtype=np.int32),
        "known_value": np.array(list(start.values()), dtype=np.float64),
    }
    if len(costs) < SMALL:
        answer = solve_here(arrays, limit_s, gap, 1e-9 * SPAN, presolve=False)
    else:
        answer = solve_apart(arrays, limit_s, gap, 1e-9 * SPAN)
    if answer.state == IMPOSSIBLE:
        return None
    if answer.state == NOTHING:
        raise Infeasible(f"no placement was found within {limit_s:g} s, though one may exist; allow more time")
    return Solution(answer.values, answer.objective / unit, answer.bound / unit, answer.proven)
