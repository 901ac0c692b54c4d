"""Planning of a service: the exact MILP for small problems, warm starts from greedy and relaxed solutions for large ones."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from shardwise.errors import Infeasible
from shardwise.serve.placement.assignment_milp import Demand, ServicePlan, bound_gap_of, find_cheapest_plan, solve_relaxation
from shardwise.serve.placement.baselines import greedy
from shardwise.serve.placement.workflow import Accuracy, Machines, Workflow

LARGE_PROBLEM = 200  # workers times operators above which the search needs a warm start
FIRST_SEARCH_SHARE = 0.6  # share of the time for the search with the variants of the relaxation


def plan_service(workflow: Workflow, machines: Machines, demand: Demand, limit_s: float = 60.0) -> ServicePlan | None:
    """Find the cheapest placement as `find_cheapest_plan` does. A large problem, which may not be proven in time, is first solved for the
    variants of its relaxation; the result is never worse than the greedy one."""
    if (
        len(machines.workers) * len(workflow.operators) <= LARGE_PROBLEM
        or demand.latency_s
        or demand.allows_shared_workers
        or demand.max_spot_share < 1
    ):
        return find_cheapest_plan(workflow, machines, demand, limit_s)
    deadline = time.monotonic() + limit_s
    placements = [greedy(workflow, machines, demand)]
    bound, likely = solve_relaxation(workflow, machines, demand, limit_s)
    if likely:
        fixed, free = _with_variants(workflow, likely), replace(demand, accuracy=0.0)
        with suppress(Infeasible):  # not found in time
            placements.append(find_cheapest_plan(fixed, machines, free, FIRST_SEARCH_SHARE * limit_s, greedy(fixed, machines, free)))
    best = min((p for p in placements if p is not None), key=lambda p: p.price_per_hour, default=None)
    cheaper = find_cheapest_plan(workflow, machines, demand, max(0.1, deadline - time.monotonic()), best)
    if cheaper is None:
        return None
    gap = min(cheaper.bound_gap, bound_gap_of(cheaper.price_per_hour, bound))
    return replace(cheaper, bound_gap=gap, planning_time_s=limit_s - (deadline - time.monotonic()))


def _with_variants(workflow: Workflow, variants: dict[str, str]) -> Workflow:
    """Restrict a workflow to one variant of each operator."""
    operators = tuple(replace(op, variants=(op.variant(variants[op.name]),)) for op in workflow.operators)
    table = tuple((row, value) for row, value in workflow.accuracy.table if row == tuple(variants[n] for n in workflow.accuracy.operators))
    return replace(workflow, operators=operators, accuracy=Accuracy(workflow.accuracy.operators, table, workflow.accuracy.base))
