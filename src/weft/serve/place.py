"""Planning of a service: the exact MILP for small problems, warm starts from greedy and relaxed solutions for large ones."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

from weft.errors import Infeasible
from weft.serve.assign import Ask, Placed, above, cheapest, relaxation
from weft.serve.baselines import greedy
from weft.serve.workflow import Accuracy, Machines, Workflow

MANY = 200  # workers times operators above which the search needs a warm start
PART = 0.6  # share of the time for the search with the variants of the relaxation


def place(workflow: Workflow, machines: Machines, ask: Ask, limit_s: float = 60.0) -> Placed | None:
    """Find the cheapest placement as `find_cheapest_plan` does. A large problem, which may not be proven in time, is first solved for the
    variants of its relaxation; the result is never worse than the greedy one."""
    if len(machines.workers) * len(workflow.operators) <= MANY or ask.latency_s or ask.shared or ask.most_spot < 1:
        return cheapest(workflow, machines, ask, limit_s)
    deadline = time.monotonic() + limit_s
    placements = [greedy(workflow, machines, ask)]
    bound, likely = relaxation(workflow, machines, ask, limit_s)
    if likely:
        fixed, free = _with(workflow, likely), replace(ask, accuracy=0.0)
        with suppress(Infeasible):  # not found in time
            placements.append(cheapest(fixed, machines, free, PART * limit_s, greedy(fixed, machines, free)))
    best = min((p for p in placements if p is not None), key=lambda p: p.price_per_hour, default=None)
    cheaper = cheapest(workflow, machines, ask, max(0.1, deadline - time.monotonic()), best)
    if cheaper is None:
        return None
    gap = min(cheaper.bound_gap, above(cheaper.price_per_hour, bound))
    return replace(cheaper, bound_gap=gap, planning_time_s=limit_s - (deadline - time.monotonic()))


def _with(workflow: Workflow, variants: dict[str, str]) -> Workflow:
    """Restrict a workflow to one variant of each operator."""
    operators = tuple(replace(op, variants=(op.variant(variants[op.name]),)) for op in workflow.operators)
    table = tuple((row, value) for row, value in workflow.accuracy.table if row == tuple(variants[n] for n in workflow.accuracy.operators))
    return replace(workflow, operators=operators, accuracy=Accuracy(workflow.accuracy.operators, table, workflow.accuracy.base))
