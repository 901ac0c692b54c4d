"""Solves a `Programme` with HiGHS (Huangfu and Hall 2018). In: columns and rows. Out: values, the cost, and the proven bound.

Needs the package `highspy`, an extra of weft's. It must never share a process with `ortools`, which carries another HiGHS.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.errors import Infeasible, UsageError
from weft.solve.placements.linear import Programme, Terms

SMALL = 400  # columns below which presolve saves nothing; HiGHS 1.15 was seen to run for ever in it on a dozen columns
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


def available() -> bool:
    """Whether the solver is installed."""
    return importlib.util.find_spec("highspy") is not None


def check_available() -> None:
    """Raise `UsageError` where the solver is not installed, with the remedy."""
    if not available():
        raise UsageError(
            "placing operators by integer programming needs the package highspy, which is not installed; "
            "use pip install 'weft[planner]', or the search of weft.model.propagate"
        )


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
    check_available()
    import highspy

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
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(costs), len(rows)
    lp.col_cost_ = np.array(costs) * unit
    lp.col_lower_ = np.zeros(len(costs))
    lp.col_upper_ = np.array(programme.uppers)
    lp.row_lower_ = np.array([least for least, _, _ in rows])
    lp.row_upper_ = np.array([most for _, most, _ in rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(columns, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(coefficients, dtype=np.float64)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[whole] for whole in programme.whole]
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    options = {
        "output_flag": False, "presolve": "off" if len(costs) < SMALL else "on", "threads": 1, "random_seed": 0, "time_limit": limit_s,
        "mip_rel_gap": gap, "mip_abs_gap": 1e-9 * SPAN,
    }  # fmt: skip
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    if start:
        solver.setSolution(len(start), np.array(list(start), dtype=np.int32), np.array(list(start.values()), dtype=np.float64))
    solver.run()
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return None
    info = solver.getInfo()
    values = tuple(solver.getSolution().col_value)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible or not values:
        raise Infeasible(f"no placement was found within {limit_s:g} s, though one may exist; allow more time")
    proven = status == highspy.HighsModelStatus.kOptimal
    return Solution(values, info.objective_function_value / unit, info.mip_dual_bound / unit, proven)
