"""The routing table of a service plan: its deployments, and prices and delays of the links to them, as plain data for the ingress.

Deployments are named by operator, variant and worker, so that those that two plans share keep running.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from shardwise.errors import UsageError
from shardwise.serve.placement.assignment_milp import GIB, ServicePlan
from shardwise.serve.placement.workflow import Machines, Workflow


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment: `replicas` machines of `worker`, each computing batches of `batch` requests, for which it waits at most `wait_s`."""

    name: str
    operator: str
    variant: str
    worker: str
    tier: int
    replicas: int
    batch: int
    wait_s: float
    load: float
    output_bytes: float


def deployments_of(workflow: Workflow, machines: Machines, plan: ServicePlan) -> tuple[Deployment, ...]:
    """Return the deployments of a plan.

    Raises:
        UsageError: a plan with shared workers, or with unknown workers or variants.
    """
    if plan.demand.allows_shared_workers:
        raise UsageError("a plan of shared workers cannot be run: each worker runs one operator; plan without --shared")
    workers = {w.name: w for w in machines.workers}
    places: list[Deployment] = []
    for choice in plan.choices:
        variants = {v.name: v for op in workflow.operators if op.name == choice.operator for v in op.variants}
        for s in choice.shares:
            if choice.variant not in variants or s.worker not in workers:
                raise UsageError(f"the plan has {choice.operator} {choice.variant} on {s.worker}, which its workflow lacks; plan again")
            machines_used = max(1, ceil(s.machines - 1e-6))
            name = f"{choice.operator}.{choice.variant}@{s.worker}x{machines_used}b{s.batch}"
            num_namesakes = sum(p.name.partition("#")[0] == name for p in places)  # equal except for utilisation
            places.append(
                Deployment(
                    f"{name}#{num_namesakes + 1}" if num_namesakes else name, choice.operator, choice.variant, s.worker,
                    workers[s.worker].tier, machines_used, s.batch, (s.batch - 1) * machines_used / s.load if s.load else 0.0, s.load,
                    variants[choice.variant].output_bytes,
                )
            )  # fmt: skip
    return tuple(places)


def routing_table_of(workflow: Workflow, machines: Machines, plan: ServicePlan, time_scale: float = 0.0) -> dict[str, Any]:
    """Build the routing table of the ingress. `time_scale`: factor on link delays; 0: without delays.

    `links`: [from deployment or source][to deployment] -> (dollars a byte, seconds, seconds a byte), for messages that go up a tier.
    """
    places = deployments_of(workflow, machines, plan)
    starts = [(s.name, s.name, s.tier) for s in workflow.sources] + [(p.name, p.worker, p.tier) for p in places]
    links: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, start, tier in starts:
        for p in places:
            link = machines.link(start, tier, machines.worker(p.worker)) if p.tier > tier else None
            if link is not None:
                delay = time_scale * link.latency_s, time_scale / link.bandwidth_bytes_per_s
                links.setdefault(name, {})[p.name] = (link.price_per_gib / GIB, *delay)
            elif p.tier != tier:
                links.setdefault(name, {})[p.name] = (float("inf"), 0.0, 0.0)  # no link
    return {
        "sources": {s.name: s.output_bytes for s in workflow.sources},
        "operators": [
            {
                "name": op.name,
                "inputs": [[name, ratio] for name, ratio in op.inputs],
                "places": [
                    {"name": p.name, "load": p.load, "output_bytes": p.output_bytes, "worker": p.worker}
                    for p in places if p.operator == op.name
                ],
            }
            for op in workflow.operators
        ],
        "links": links,
        "sinks": list(workflow.sinks),
    }  # fmt: skip
