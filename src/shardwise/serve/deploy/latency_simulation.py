"""Discrete-event simulation of request latencies under a service plan.

It follows the ingress without computing: random arrivals, the same weighted routing, one queue for the machines of a deployment, batches
that start when they are full or the first request has waited long enough. The plan's own latency adds up percentiles, an upper bound;
this is the expected distribution. Not modelled: overhead of Ray and HTTP.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from shardwise.serve.deploy.dataflow import WeightedRouter, operators_on_items
from shardwise.serve.deploy.replica import profiled_batch_s
from shardwise.serve.deploy.routing_table import Deployment
from shardwise.serve.placement.workflow import Workflow, WorkflowOperator

LinkTable = Mapping[str, Mapping[str, tuple[float, float, float]]]  # [from][to] -> price, seconds, seconds a byte


@dataclass
class _PlaceQueue:
    deployment: Deployment
    batches: Sequence[tuple[int, float]]
    num_idle: int
    waiting: deque[tuple[float, int]] = field(default_factory=deque)


class _WorkflowSimulation:
    def __init__(self, workflow: Workflow, places: Sequence[Deployment], links: LinkTable) -> None:
        self.workflow, self.links = workflow, links
        self.inner = operators_on_items(workflow)
        self.queues = {
            p.name: _PlaceQueue(p, workflow.operator(p.operator).variant(p.variant).batches(p.worker), p.replicas) for p in places
        }
        self.routers = {
            op.name: WeightedRouter({p.name: max(p.load, 1e-9) for p in places if p.operator == op.name}) for op in workflow.operators
        }
        self.message_bytes = {s.name: s.output_bytes for s in workflow.sources} | {p.name: p.output_bytes for p in places}
        self.events: list[tuple[float, int, str, Any]] = []
        self.num_events = 0
        # [request, operator] -> number of inputs to come, number of items to be answered, and deployment of the first item.
        self.num_missing_inputs: dict[tuple[int, str], int] = {}
        self.num_pending_items: dict[tuple[int, str], int] = {}
        self.items_per_request: dict[tuple[int, str], int] = {}
        self.computed_at: dict[tuple[int, str], str] = {}
        self.start_s: dict[int, float] = {}
        self.end_s: dict[int, float] = {}

    def push(self, at_s: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (at_s, self.num_events, kind, what))
        self.num_events += 1

    def run(self, arrivals: Sequence[float]) -> list[float]:
        for request, at in enumerate(arrivals):
            self.start_s[request] = at
            for op in self.workflow.operators:
                self.num_missing_inputs[request, op.name] = len(op.inputs)
            for source in self.workflow.sources:
                self.push(at, "came", (request, source.name))
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if kind == "came":
                self._on_value(now, *what)
            elif kind == "arrive":
                name, request = what
                self.queues[name].waiting.append((now, request))
                self._start_batches(now, self.queues[name])
                wait = self.queues[name].deployment.wait_s
                if wait:
                    self.push(now + wait, "look", name)
            elif kind == "look":
                self._start_batches(now, self.queues[what])
            else:
                name, requests = what
                self.queues[name].num_idle += 1
                self._start_batches(now, self.queues[name])
                for request in requests:
                    self._on_answer(now, request, self.queues[name].deployment)
        return [self.end_s[r] - self.start_s[r] for r in sorted(self.end_s)]

    def _on_value(self, now: float, request: int, name: str) -> None:
        """Handle a value: start the operators whose last input it is."""
        for op in self.workflow.operators:
            if name not in dict(op.inputs):
                continue
            self.num_missing_inputs[request, op.name] -= 1
            if not self.num_missing_inputs[request, op.name]:
                self._send(now, request, op)

    def _send(self, now: float, request: int, op: WorkflowOperator) -> None:
        starts = [self.computed_at.get((request, n), n) for n, _ in op.inputs]
        names = [n for n, q in self.queues.items() if q.deployment.operator == op.name]
        costs = {n: [self.links.get(s, {}).get(n, (0.0, 0.0, 0.0)) for s in starts] for n in names}
        sizes = [self.message_bytes.get(s, 0.0) for s in starts]
        price = {n: sum(cost[0] * max(size, 1.0) for cost, size in zip(costs[n], sizes, strict=True)) for n in names}
        ratio = max(r for _, r in op.inputs)
        items_each = max(1, round(ratio)) if ratio > 1 else max(self.items_per_request.get((request, n), 1) for n, _ in op.inputs)
        items = self.items_per_request[request, op.name] = self.num_pending_items[request, op.name] = (
            items_each if op.name in self.inner else 1
        )
        for _ in range(items):
            chosen = self.routers[op.name].choose(price)
            hop = max(cost[1] + cost[2] * size for cost, size in zip(costs[chosen], sizes, strict=True))
            self.computed_at.setdefault((request, op.name), chosen)
            self.push(now + hop, "arrive", (chosen, request))

    def _start_batches(self, now: float, queue: _PlaceQueue) -> None:
        while queue.num_idle and queue.waiting:
            first, _ = queue.waiting[0]
            if len(queue.waiting) < queue.deployment.batch and now < first + queue.deployment.wait_s - 1e-12:
                return
            requests = [queue.waiting.popleft()[1] for _ in range(min(queue.deployment.batch, len(queue.waiting)))]
            queue.num_idle -= 1
            self.push(now + profiled_batch_s(queue.batches, len(requests)), "free", (queue.deployment.name, requests))

    def _on_answer(self, now: float, request: int, place: Deployment) -> None:
        self.num_pending_items[request, place.operator] -= 1
        if self.num_pending_items[request, place.operator]:
            return
        if place.operator in self.workflow.sinks:
            self.end_s[request] = max(now, self.end_s.get(request, 0.0))
        self.push(now, "came", (request, place.operator))


def simulate_latencies(workflow: Workflow, places: Sequence[Deployment], links: LinkTable, arrivals: Sequence[float]) -> list[float]:
    """Latency in seconds of each request that arrives at these times; every source sends one value a request."""
    return _WorkflowSimulation(workflow, places, links).run(arrivals)


def random_arrivals(rate: float, requests: int, seed: int = 0) -> list[float]:
    """Draw arrival times of a Poisson process with `rate` requests a second."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(requests)))
