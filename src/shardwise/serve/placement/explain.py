"""Explanation of a placement: binding constraints, the accuracy-price frontier, or why a demand is infeasible and what is feasible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.errors import Infeasible
from shardwise.serve.placement.assignment_milp import Demand, ServicePlan, find_highest_rate
from shardwise.serve.placement.service_planner import plan_service
from shardwise.serve.placement.workflow import Machines, Workflow
from shardwise.units import format_seconds

FULL_UTILISATION = 0.999


@dataclass(frozen=True, slots=True)
class Reason:
    """`what`: a constraint or a part of the plan; `why`: the explanation."""

    what: str
    why: str


def price_frontier(workflow: Workflow, machines: Machines, demand: Demand, limit_s: float = 60.0) -> tuple[ServicePlan, ...]:
    """Return the Pareto frontier of accuracy and price: the cheapest plan of each accuracy, ascending."""
    plans: list[ServicePlan] = []
    dearest = float("inf")
    for level in reversed(workflow.accuracy_levels()):
        if plans and plans[-1].accuracy < level:
            continue  # the previous plan is at least as accurate at no higher price
        try:
            plan = plan_service(workflow, machines, replace(demand, accuracy=level), limit_s)
        except Infeasible:  # not found in time
            continue
        if plan is not None and plan.price_per_hour < dearest - 1e-9:
            plans.append(plan)
            dearest = plan.price_per_hour
    return tuple(reversed(plans))


def explain_plan(
    workflow: Workflow, machines: Machines, plan: ServicePlan, frontier: tuple[ServicePlan, ...], limit_s: float = 60.0
) -> tuple[Reason, ...]:
    """Explain a plan: its binding constraints, and the accuracy of the next plan on the frontier."""
    ask = plan.demand
    why = [Reason("accuracy", f"{plan.accuracy:g} of at least {ask.accuracy:g}")]
    why += [Reason(f"{c.operator}", _describe_choice(workflow, c.operator, plan)) for c in plan.choices]
    better = next((p for p in frontier if p.accuracy > plan.accuracy), None)
    if better is not None:
        more = better.price_per_hour - plan.price_per_hour
        why.append(Reason("the next cent", f"${more:,.4f} an hour more buys {better.accuracy:g}: {_list_differences(plan, better)}"))
    else:
        why.append(Reason("the next cent", "buys no accuracy: this is the most accurate choice that these workers can run"))
    most, proven = find_highest_rate(workflow, machines, ask, limit_s, plan)
    words = f"{ask.rate:g} requests/s; all workers together do {'' if proven else 'at least '}{most:.4g} at this accuracy"
    why.append(Reason("rate", words))
    full = [f"{s.worker} ({c.operator})" for c in plan.choices for s in c.shares if s.utilisation >= FULL_UTILISATION]
    if full:
        why.append(Reason("full workers", f"{', '.join(full)}: another request/s needs other workers"))
    if ask.latency_s:
        words = f"{format_seconds(plan.latency_s)} for {ask.percentile:.0%} of requests, at most {format_seconds(ask.latency_s)}"
        why.append(Reason("latency", words))
    return tuple(why)


def _describe_choice(workflow: Workflow, operator: str, plan: ServicePlan) -> str:
    choice = plan.choice(operator)
    count = len(workflow.operator(operator).variants)
    who = ", ".join(f"{s.machines:g} x {s.worker} at {s.utilisation:.0%}" for s in choice.shares)
    return f"{choice.variant}{f' of {count} variants' if count > 1 else ''} on {who}"


def _list_differences(a: ServicePlan, b: ServicePlan) -> str:
    changed = [f"{x.operator} {x.variant} to {y.variant}" for x, y in zip(a.choices, b.choices, strict=True) if x.variant != y.variant]
    return ", ".join(changed) or "other workers"


def refuse(workflow: Workflow, machines: Machines, demand: Demand, limit_s: float = 60.0) -> Infeasible:
    """Return the error that explains why a demand is infeasible, with the nearest feasible one."""
    top = max(workflow.accuracy_levels())
    if demand.accuracy > top + 1e-12:
        return Infeasible(f"accuracy {demand.accuracy:g} is out of reach: the best choice of variants has {top:g}; use --accuracy {top:g}")
    for op in workflow.operators:
        if not any(v.batches(w.name) for v in op.variants for w in machines.workers):
            have = sorted({worker for v in op.variants for worker, _ in v.latency_s})
            return Infeasible(
                f"no worker can run {op.name}: its latencies are of {', '.join(have) or 'none'}, and the workers are "
                f"{', '.join(w.name for w in machines.workers)}; profile it there, or add one of those"
            )
    loose = replace(demand, latency_s=0.0)
    most, proven = find_highest_rate(workflow, machines, loose, limit_s)
    if not proven and most < demand.rate:
        return Infeasible(
            f"nothing does {demand.rate:g} requests/s at accuracy {demand.accuracy:g}; how many can be done was not found in {limit_s:g} s"
        )
    unlinked = ", ".join(_unlinked_workers(workflow, machines))
    if most <= 1e-9:
        nowhere = "the variants that are accurate enough run only on workers that no request gets to"
        why = f"no link leads to {unlinked}" if unlinked else nowhere
        return Infeasible(f"no requests get through at accuracy {demand.accuracy:g}: {why}; add a [[link]], or ask for less accuracy")
    if most < demand.rate * (1 - 1e-9):
        return Infeasible(
            f"{demand.rate:g} requests/s are beyond all workers: together they do {most:.4g} at accuracy {demand.accuracy:g}; "
            f"use --rate {_round_down(most):g}, less accuracy, or more workers"
            + (f"; no link leads to {unlinked}, which do nothing" if unlinked else "")
        )
    nearest = _least_latency(workflow, machines, demand, limit_s)
    remedy = f"the nearest is {format_seconds(nearest)}: use --latency {nearest:.3g}" if nearest else "use a lower rate"
    target = f"{format_seconds(demand.latency_s)} for {demand.percentile:.0%} of requests"
    return Infeasible(f"{target} cannot be kept at {demand.rate:g} requests/s; {remedy}")


def _least_latency(workflow: Workflow, machines: Machines, demand: Demand, limit_s: float) -> float:
    """Return the lowest feasible latency target, to 5 %, rounded up; 0 if none was found."""
    low, high = demand.latency_s, demand.latency_s
    for _ in range(12):
        high *= 2
        if plan_service(workflow, machines, replace(demand, latency_s=high), limit_s) is not None:
            break
    else:
        return 0.0
    while high > low * 1.05:
        middle = (low * high) ** 0.5
        if plan_service(workflow, machines, replace(demand, latency_s=middle), limit_s) is None:
            low = middle
        else:
            high = middle
    return high


def _unlinked_workers(workflow: Workflow, machines: Machines) -> Iterator[str]:
    """Yield workers above the lowest tier that no link reaches."""
    for w in machines.workers:
        from_sources = any(s.tier == w.tier or machines.link(s.name, s.tier, w) for s in workflow.sources)
        if not from_sources and not any(o.tier < w.tier and machines.link(o.name, o.tier, w) for o in machines.workers):
            yield w.name


def _round_down(rate: float) -> float:
    """Round down to three digits.

    >>> _round_down(107.0819)
    107.0
    """
    step = 10.0 ** (len(str(int(rate))) - 3) if rate >= 1 else 0.001
    return float(f"{int(rate / step) * step:.6g}")
