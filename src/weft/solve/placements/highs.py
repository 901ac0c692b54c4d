"""Solves a `Programme` with HiGHS (Huangfu and Hall 2018). In: columns and rows. Out: values, the cost, and the proven bound.

Needs the package `highspy`, an extra of weft's. It must never share a process with `ortools`, which carries another HiGHS.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import numpy as np

from weft.errors import Infeasible, UsageError
from weft.solve.placements.linear import Programme

SPAN = 1e4  # costs are scaled to about this size, and so are bytes, since the solver's tolerances are absolute
TOLERANCE = 1e-6  # a column of 0 or 1 that is this near to it is it


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


def solve(programme: Programme, most_bytes: float, limit_s: float, gap: float) -> Solution | None:
    """The cheapest solution within `most_bytes`; None where there is none at all.

    Raises:
        Infeasible: none was found within `limit_s` seconds, though there may be one.
    """
    return _run(programme, programme.costs, most_bytes, limit_s, gap)


def least_bytes(programme: Programme, limit_s: float) -> float:
    """The fewest bytes with which any solution exists (proven to one part in a thousand, or as far as the time allows)."""
    costs = [0.0] * len(programme.costs)
    for column, size in programme.bytes:
        costs[column] += size
    found = _run(programme, costs, float("inf"), limit_s, 1e-3)
    return float("inf") if found is None else found.cost + programme.fixed_bytes


def _run(programme: Programme, costs: list[float], most_bytes: float, limit_s: float, gap: float) -> Solution | None:
    check_available()
    import highspy

    rows = list(programme.rows)
    if most_bytes < float("inf"):
        scale = SPAN / most_bytes
        rows.append((-float("inf"), (most_bytes - programme.fixed_bytes) * scale, [(c, size * scale) for c, size in programme.bytes]))
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
    options = {"output_flag": False, "threads": 1, "random_seed": 0, "time_limit": limit_s, "mip_rel_gap": gap, "mip_abs_gap": 1e-9 * SPAN}
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(lp)
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
