"""The cheapest placement, searched from a greedy one. In: workflow, machines, what is asked for. Out: `Placed`."""

from __future__ import annotations

from weft.serve.assign import Ask, Placed, cheapest
from weft.serve.baselines import greedy
from weft.serve.workflow import Machines, Workflow

MANY = 200  # workers times operators from which a search needs a place to begin


def place(workflow: Workflow, machines: Machines, ask: Ask, limit_s: float = 60.0) -> Placed | None:
    """As `cheapest`; a large problem, which may not be proven in time, is never answered worse than greedily."""
    large = len(machines.workers) * len(workflow.operators) > MANY and not ask.latency_s and not ask.shared and ask.most_spot == 1
    return cheapest(workflow, machines, ask, limit_s, greedy(workflow, machines, ask) if large else None)
