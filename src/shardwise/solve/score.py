"""Score of a plan under an objective, of which less is better, and the choice of the least synchronized of nearly equal plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import exp, inf, log

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step_time.timing import PricedLayout
from shardwise.plan.layout import Layout

OBJECTIVES = ("time", "cost", "energy", "memory")
JITTER = 0.02  # of the step: by how much figures of CPUs differ from probe to probe
TIME_TOLERANCE = 0.004  # relative difference below which times are equal


def _round_seconds(seconds: float) -> float:
    """Round to a grid of steps of 0.4 %: no prediction is as exact, and decimal digits would be as coarse as 1 % at 1.00."""
    return exp(round(log(seconds) / TIME_TOLERANCE) * TIME_TOLERANCE) if 0 < seconds < inf else seconds


def objective_value(layout: Layout, seconds: float, cluster: Cluster, objective: str) -> float:
    """Return the objective for a step of so many seconds, on a grid within whose cells the simpler and leaner layout wins."""
    seconds = _round_seconds(seconds)
    if objective == "time":
        return seconds
    return seconds * layout.num_ranks * (cluster.threads_of(layout.num_ranks, layout.threads) or 1)


def score_plan(priced: PricedLayout, cluster: Cluster, objective: str) -> tuple[float, ...]:
    """Return the objective, and then what distinguishes plans of equal value: the fastest, the fewest ranks, the simplest, the leanest."""
    layout, prediction = priced.layout, priced.prediction
    seconds = _round_seconds(prediction.step_time_s)
    if objective == "memory":
        return (prediction.memory.total, seconds)
    num_changed = sum(getattr(layout, f.name) != f.default for f in fields(Layout))
    return (
        objective_value(layout, prediction.step_time_s, cluster, objective),
        seconds,
        layout.num_ranks,
        layout.microbatches,
        num_changed,
        prediction.memory.total,
    )


def least_synchronized(timed_layouts: Sequence[PricedLayout], best: PricedLayout) -> PricedLayout:
    """Return the plan whose ranks synchronize least often, of those about as fast as the best.

    On CPUs other processes delay a rank now and then, and all that wait for it; that is not priced. Tensor ranks synchronize in
    every layer, stages with every microbatch, replicas once a step.
    """

    def synchronization(one: PricedLayout) -> tuple[object, ...]:
        layout = one.layout
        inside, stages = layout.replica_ranks > 1, layout.pipeline > 1
        return inside, stages, layout.offload != "none", layout.recompute != "none", layout.zero, _step_s(one)

    return min((one for one in (best, *timed_layouts) if _step_s(one) <= _step_s(best) * (1 + JITTER)), key=synchronization)


def _step_s(priced: PricedLayout) -> float:
    return priced.prediction.step_time_s
