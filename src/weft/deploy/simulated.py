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

from weft.deploy.flow import by_item
from weft.deploy.replica import planned_s
from weft.deploy.shares import Shares
from weft.deploy.table import Place
from weft.serve.workflow import Operator, Workflow

Way = Mapping[str, Mapping[str, tuple[float, float, float]]]  # [from][to] -> price, seconds, seconds a byte


@dataclass
class _Queue:
    place: Place
    batches: Sequence[tuple[int, float]]
    idle: int
    waiting: deque[tuple[float, int]] = field(default_factory=deque)


class _Simulation:
    def __init__(self, workflow: Workflow, places: Sequence[Place], links: Way) -> None:
        self.workflow, self.links = workflow, links
        self.inner = by_item(workflow)
        self.queues = {p.name: _Queue(p, workflow.operator(p.operator).variant(p.variant).batches(p.worker), p.replicas) for p in places}
        self.shares = {op.name: Shares({p.name: max(p.load, 1e-9) for p in places if p.operator == op.name}) for op in workflow.operators}
        self.size = {s.name: s.output_bytes for s in workflow.sources} | {p.name: p.output_bytes for p in places}
        self.events: list[tuple[float, int, str, Any]] = []
        self.count = 0
        # [request, operator] -> number of inputs to come, number of items to be answered, and deployment of the first item.
        self.missing: dict[tuple[int, str], int] = {}
        self.items: dict[tuple[int, str], int] = {}
        self.each: dict[tuple[int, str], int] = {}
        self.at: dict[tuple[int, str], str] = {}
        self.begun: dict[int, float] = {}
        self.done: dict[int, float] = {}

    def push(self, at_s: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (at_s, self.count, kind, what))
        self.count += 1

    def run(self, arrivals: Sequence[float]) -> list[float]:
        for request, at in enumerate(arrivals):
            self.begun[request] = at
            for op in self.workflow.operators:
                self.missing[request, op.name] = len(op.inputs)
            for source in self.workflow.sources:
                self.push(at, "came", (request, source.name))
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if kind == "came":
                self._came(now, *what)
            elif kind == "arrive":
                name, request = what
                self.queues[name].waiting.append((now, request))
                self._start(now, self.queues[name])
                wait = self.queues[name].place.wait_s
                if wait:
                    self.push(now + wait, "look", name)
            elif kind == "look":
                self._start(now, self.queues[what])
            else:
                name, requests = what
                self.queues[name].idle += 1
                self._start(now, self.queues[name])
                for request in requests:
                    self._answered(now, request, self.queues[name].place)
        return [self.done[r] - self.begun[r] for r in sorted(self.done)]

    def _came(self, now: float, request: int, name: str) -> None:
        """Handle a value: start the operators whose last input it is."""
        for op in self.workflow.operators:
            if name not in dict(op.inputs):
                continue
            self.missing[request, op.name] -= 1
            if not self.missing[request, op.name]:
                self._send(now, request, op)

    def _send(self, now: float, request: int, op: Operator) -> None:
        starts = [self.at.get((request, n), n) for n, _ in op.inputs]
        names = [n for n, q in self.queues.items() if q.place.operator == op.name]
        costs = {n: [self.links.get(s, {}).get(n, (0.0, 0.0, 0.0)) for s in starts] for n in names}
        sizes = [self.size.get(s, 0.0) for s in starts]
        price = {n: sum(cost[0] * max(size, 1.0) for cost, size in zip(costs[n], sizes, strict=True)) for n in names}
        ratio = max(r for _, r in op.inputs)
        items_each = max(1, round(ratio)) if ratio > 1 else max(self.each.get((request, n), 1) for n, _ in op.inputs)
        items = self.each[request, op.name] = self.items[request, op.name] = items_each if op.name in self.inner else 1
        for _ in range(items):
            chosen = self.shares[op.name].take(price)
            hop = max(cost[1] + cost[2] * size for cost, size in zip(costs[chosen], sizes, strict=True))
            self.at.setdefault((request, op.name), chosen)
            self.push(now + hop, "arrive", (chosen, request))

    def _start(self, now: float, queue: _Queue) -> None:
        while queue.idle and queue.waiting:
            first, _ = queue.waiting[0]
            if len(queue.waiting) < queue.place.batch and now < first + queue.place.wait_s - 1e-12:
                return
            requests = [queue.waiting.popleft()[1] for _ in range(min(queue.place.batch, len(queue.waiting)))]
            queue.idle -= 1
            self.push(now + planned_s(queue.batches, len(requests)), "free", (queue.place.name, requests))

    def _answered(self, now: float, request: int, place: Place) -> None:
        self.items[request, place.operator] -= 1
        if self.items[request, place.operator]:
            return
        if place.operator in self.workflow.sinks:
            self.done[request] = max(now, self.done.get(request, 0.0))
        self.push(now, "came", (request, place.operator))


def latencies(workflow: Workflow, places: Sequence[Place], links: Way, arrivals: Sequence[float]) -> list[float]:
    """Latency in seconds of each request that arrives at these times; every source sends one value a request."""
    return _Simulation(workflow, places, links).run(arrivals)


def random_arrivals(rate: float, requests: int, seed: int = 0) -> list[float]:
    """Draw arrival times of a Poisson process with `rate` requests a second."""
    rng = random.Random(seed)
    return list(accumulate(rng.expovariate(rate) for _ in range(requests)))
