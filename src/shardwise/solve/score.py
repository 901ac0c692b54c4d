"""Score of a plan under an objective, of which less is better, and the choice of the simplest of nearly equal plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import exp, inf, log

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step_time.timing import PricedLayout
from shardwise.errors import UsageError, did_you_mean
from shardwise.plan.layout import Layout

OBJECTIVES = ("time", "cost", "energy", "memory")
JITTER = 0.02  # of the step: by how much figures of CPUs differ from probe to probe
SAME = 0.01  # of the objective: plans this near one another are equally good
TIME_TOLERANCE = 0.004  # relative difference below which times are equal


def check_objective(objective: str) -> None:
    """Raise `UsageError` for an unknown objective."""
    if objective not in OBJECTIVES:
        raise UsageError(f"unknown objective {objective}{did_you_mean(objective, OBJECTIVES)}; use one of {', '.join(OBJECTIVES)}")


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
    return (
        objective_value(layout, prediction.step_time_s, cluster, objective),
        seconds,
        layout.num_ranks,
        layout.microbatches,
        _num_changed(layout),
        prediction.memory.total,
    )


def simplest_plan(timed_layouts: Sequence[PricedLayout], best: PricedLayout, cluster: Cluster, objective: str) -> PricedLayout:
    """Return the simplest of the plans that are about as good as the best: the difference is less than a prediction is exact to.

    Simple is what synchronizes least often: tensor ranks synchronize in every layer, stages with every microbatch, replicas once a step.
    On CPUs other processes delay a rank now and then, and all that wait for it, which is not priced. Then what needs fewer mechanisms,
    and the fewest keys.
    """
    if objective == "memory":
        return best
    window = JITTER if cluster.kind.shares_hosts else SAME

    def value(one: PricedLayout) -> float:
        return one.prediction.step_time_s * objective_value(one.layout, 1.0, cluster, objective)

    def simplicity(one: PricedLayout) -> tuple[object, ...]:
        layout = one.layout
        inside, stages = layout.replica_ranks > 1, layout.pipeline > 1
        return inside, stages, layout.offload != "none", layout.recompute != "none", layout.zero, _num_changed(layout), value(one)

    return min((one for one in (best, *timed_layouts) if value(one) <= value(best) * (1 + window)), key=simplicity)


def _num_changed(layout: Layout) -> int:
    return sum(getattr(layout, f.name) != f.default for f in fields(Layout))
