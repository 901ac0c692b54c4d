"""A mixed-integer linear programme (MILP), built column by column and row by row and solved by HiGHS, with the best proven bound.

Needs the extra `serve` (highspy), which must never share a process with `ortools`: both include HiGHS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import UsageError

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """`values` are empty if no solution was found, and the programme is infeasible if that is `proven`; `bound`: of the objective."""

    values: tuple[float, ...]
    objective: float
    bound: float
    proven: bool


@dataclass
class Milp:
    """Minimises the sum of cost x column under rows `least <= sum of coefficient x column <= most`."""

    costs: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)

    def add_column(self, upper: float = INFINITE, cost: float = 0.0, integer: bool = False, lower: float = 0.0) -> int:
        """Add a column with bounds `lower` and `upper`; return its index."""
        self.costs.append(cost)
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.costs) - 1

    def add_row(self, terms: Mapping[int, float], lower: float = -INFINITE, upper: float = INFINITE) -> None:
        self.rows.append((lower, upper, {column: value for column, value in terms.items() if value}))

    def solve(self, limit_s: float = 60.0, start: Mapping[int, float] | None = None, is_relaxed: bool = False) -> MilpSolution:
        """Find the optimum, or the best solution within `limit_s` seconds. `start`: values of some columns of a known solution.
        `is_relaxed`: integer columns become continuous.

        Raises:
            UsageError: highspy is not installed.
        """
        highs: Any
        try:
            import highspy as highs  # here: slow to import
        except ImportError:
            raise UsageError("placing a workflow needs HiGHS: pip install 'shardwise[serve]'") from None
        problem = highs.HighsLp()
        problem.num_col_, problem.num_row_ = len(self.costs), len(self.rows)
        problem.col_cost_, problem.col_lower_, problem.col_upper_ = self.costs, self.lower, self.upper
        problem.row_lower_, problem.row_upper_ = [row[0] for row in self.rows], [row[1] for row in self.rows]
        starts, columns, values = [0], [], []
        for _, _, terms in self.rows:
            columns += list(terms)
            values += list(terms.values())
            starts.append(len(columns))
        problem.a_matrix_.format_ = highs.MatrixFormat.kRowwise
        problem.a_matrix_.start_, problem.a_matrix_.index_, problem.a_matrix_.value_ = starts, columns, values
        kinds = (highs.HighsVarType.kContinuous, highs.HighsVarType.kInteger)
        problem.integrality_ = [kinds[is_integer and not is_relaxed] for is_integer in self.integer]
        solver = highs.Highs()
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("time_limit", float(limit_s))
        solver.setOptionValue("mip_rel_gap", 1e-9)
        solver.setOptionValue("mip_feasibility_tolerance", 1e-9)
        solver.setOptionValue("threads", 1)
        solver.passModel(problem)
        if start:
            solver.setSolution(len(start), list(start), list(start.values()))
        solver.run()
        info, status = solver.getInfo(), solver.getModelStatus()
        if info.primal_solution_status != highs.SolutionStatus.kSolutionStatusFeasible:
            ruled_out = (highs.HighsModelStatus.kInfeasible, highs.HighsModelStatus.kUnboundedOrInfeasible)  # every column is bounded
            return MilpSolution((), INFINITE, INFINITE, status in ruled_out)
        bound = info.mip_dual_bound if any(self.integer) and not is_relaxed else info.objective_function_value
        solution = tuple(solver.getSolution().col_value)
        return MilpSolution(solution, info.objective_function_value, bound, status == highs.HighsModelStatus.kOptimal)
