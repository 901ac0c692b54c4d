"""Baseline placements for comparison: JellyBean's beam search, a greedy one, and the highest tier alone.

`two_steps` is JellyBean's algorithm (Wu et al., VLDB 2022, sections 4.2 and 4.3, "multiple tiers", greedy within): a beam of variants
under the accuracy target, then workers for one operator after another in topological order, with a beam of partial assignments. `greedy`
is the same with all beams of width one. `one_size` places the most accurate variants in the highest tier.

Throughput only: neither latency targets nor shared workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from shardwise.errors import Infeasible
from shardwise.serve.placement.assignment_milp import (
    GIB,
    HOUR_S,
    Demand,
    ServicePlan,
    VariantChoice,
    WorkerShare,
    find_cheapest_plan,
    require_accuracy,
)
from shardwise.serve.placement.milp import Milp
from shardwise.serve.placement.workflow import Machines, OperatorVariant, TierLink, WorkerGroup, Workflow, WorkflowOperator

BEAM, ORDERS, STATES = 10, 10, 10  # JellyBean's own configuration


def two_steps(
    workflow: Workflow, machines: Machines, demand: Demand, beam: int = BEAM, orders: int = ORDERS, states: int = STATES
) -> ServicePlan | None:
    """Find a placement by JellyBean's beam search; None if it finds none."""
    begun, workers = time.monotonic(), _single_machines(machines)
    best: tuple[float, _PartialPlan, dict[str, OperatorVariant]] | None = None
    for variants in islice(_accurate_choices(workflow, machines, demand.accuracy), beam):
        for order in islice(_topological_orders(workflow, ()), orders):
            for state in _assign_workers(_PlacementCase(workflow, machines, demand, variants), order, workers, states):
                if best is None or state.price < best[0]:
                    best = state.price, state, variants
    if best is None:
        return None
    price, state, variants = best
    return _complete_plan(workflow, demand, state, variants, price, time.monotonic() - begun)


def greedy(workflow: Workflow, machines: Machines, demand: Demand) -> ServicePlan | None:
    """Find a placement greedily: the cheapest accurate variants, in one topological order, each operator at its least price."""
    return two_steps(workflow, machines, demand, 1, 1, 1)


def one_size(workflow: Workflow, machines: Machines, demand: Demand, limit_s: float = 60.0) -> ServicePlan | None:
    """Find the cheapest placement of the most accurate variants in the highest tier."""
    top = max(w.tier for w in machines.workers)
    top_machines = Machines(tuple(w for w in machines.workers if w.tier == top), _links_within_tier(machines, top))
    try:
        return find_cheapest_plan(workflow, top_machines, replace(demand, accuracy=max(workflow.accuracy_levels())), limit_s)
    except Infeasible:  # not found in time
        return None


def _links_within_tier(machines: Machines, top: int) -> tuple[TierLink, ...]:
    names = {w.name for w in machines.workers if w.tier < top}
    return tuple(link for link in machines.links if not {link.start, link.end} & names)


@dataclass(frozen=True)
class _PlacementCase:
    workflow: Workflow
    machines: Machines
    demand: Demand
    variants: Mapping[str, OperatorVariant]

    def capacity(self, op: WorkflowOperator, worker: WorkerGroup) -> float:
        """Requests/s of one machine; 0 if it cannot run the variant."""
        return max((b / seconds for b, seconds in self.variants[op.name].batches(worker.name)), default=0.0)

    def traffic(
        self, op: WorkflowOperator, worker: WorkerGroup, load: float, shares: Mapping[str, tuple[tuple[WorkerGroup, float], ...]]
    ) -> float:
        """Dollars an hour for the inputs of `load` requests/s on a worker, from each origin in proportion to its output."""
        total = 0.0
        sources = {s.name: s for s in self.workflow.sources}
        for name, _ in op.inputs:
            if name in sources:
                source = sources[name]
                starts = [(source.name, source.tier, 1.0, source.output_bytes)]
            else:
                produced = sum(x for _, x in shares[name])
                starts = [(w.name, w.tier, x / produced, self.variants[name].output_bytes) for w, x in shares[name]]
            for start, tier, fraction, size in starts:
                if worker.tier < tier:
                    return inf
                link = self.machines.link(start, tier, worker)
                if worker.tier > tier:
                    total += inf if link is None else link.price_per_gib * size * load * fraction * HOUR_S / GIB
        return total


@dataclass(frozen=True)
class _PartialPlan:
    price: float
    compute: float
    shares: Mapping[str, tuple[tuple[WorkerGroup, float], ...]]
    free: frozenset[int]


def _assign_workers(case: _PlacementCase, order: tuple[WorkflowOperator, ...], workers: list[WorkerGroup], beam: int) -> list[_PartialPlan]:
    """Return complete assignments, cheapest first, by a beam search that assigns operators in `order`."""
    states = [_PartialPlan(0.0, 0.0, {}, frozenset(range(len(workers))))]
    tiers = sorted({w.tier for w in workers})
    for op in order:
        load = case.workflow.rates[op.name] * case.demand.rate
        extended = []
        for state in states:
            below = max((max(w.tier for w, _ in state.shares[name]) for name, _ in op.inputs if name in state.shares), default=0)
            for top in (t for t in tiers if t >= below):
                candidates = [i for i in sorted(state.free) if below <= workers[i].tier <= top and case.capacity(op, workers[i]) > 0]
                chosen = _fill_load(case, op, load, workers, candidates, state.shares)
                if chosen is None:
                    continue
                shares = tuple((workers[i], x) for i, x in chosen)
                compute = sum(w.price_per_hour for w, _ in shares)
                traffic = sum(case.traffic(op, w, x, state.shares) for w, x in shares)
                if traffic < inf:
                    free = state.free - {i for i, _ in chosen}
                    extended.append(
                        _PartialPlan(state.price + compute + traffic, state.compute + compute, {**state.shares, op.name: shares}, free)
                    )
        states = sorted(extended, key=lambda s: s.price)[:beam]
    return states


def _fill_load(
    case: _PlacementCase,
    op: WorkflowOperator,
    load: float,
    workers: list[WorkerGroup],
    candidates: list[int],
    shares: Mapping[str, tuple[tuple[WorkerGroup, float], ...]],
) -> list[tuple[int, float]] | None:
    """Choose workers until they carry the load: the cheapest worker of the lowest tier that carries the rest alone, else the one with the
    least price a request. Return (worker, load), None if the load does not fit."""
    chosen: list[tuple[int, float]] = []
    rest, waiting = load, list(candidates)
    unit = {i: case.traffic(op, workers[i], 1.0, shares) for i in candidates}
    while rest > 1e-12 * load:
        if not waiting:
            return None
        lowest = min(workers[i].tier for i in waiting)
        alone = [i for i in waiting if workers[i].tier == lowest and case.capacity(op, workers[i]) >= rest]

        def price(i: int, x: float) -> float:
            return workers[i].price_per_hour + x * unit[i]

        if alone:
            best = min(alone, key=lambda i: (price(i, rest), case.capacity(op, workers[i])))
            waiting = alone
        else:
            best = min(waiting, key=lambda i: (price(i, case.capacity(op, workers[i])) / case.capacity(op, workers[i]), price(i, rest)))
        assigned = min(rest, case.capacity(op, workers[best]))
        chosen.append((best, assigned))
        waiting = [i for i in waiting if i != best]
        rest -= assigned
    return chosen


def _accurate_choices(workflow: Workflow, machines: Machines, accuracy: float) -> Iterator[dict[str, OperatorVariant]]:
    """Yield choices of variants that are accurate enough, by the mean cost of their requests over workers (unknown costs last)."""

    def cost(v: OperatorVariant) -> float:
        costs = [(machines.worker(name).price_per_hour * batches[0][1]) for name, batches in v.latency_s if batches]
        return sum(costs) / len(costs) if costs else 1e6

    milp = Milp()
    columns = {(op.name, v.name): milp.add_column(1, cost(v), integer=True) for op in workflow.operators for v in op.variants}
    require_accuracy(milp, workflow, accuracy, columns)
    while values := milp.solve().values:
        choice = {op.name: next(v for v in op.variants if values[columns[op.name, v.name]] > 0.5) for op in workflow.operators}
        yield choice
        milp.add_row({columns[name, v.name]: 1.0 for name, v in choice.items()}, upper=len(choice) - 1)  # exclude this choice


def _topological_orders(workflow: Workflow, done: tuple[WorkflowOperator, ...]) -> Iterator[tuple[WorkflowOperator, ...]]:
    """Yield the topological orders of the operators."""
    if len(done) == len(workflow.operators):
        yield done
        return
    ready = {op.name for op in done} | {s.name for s in workflow.sources}
    for op in workflow.operators:
        if op not in done and all(name in ready for name, _ in op.inputs):
            yield from _topological_orders(workflow, (*done, op))


def _single_machines(machines: Machines) -> list[WorkerGroup]:
    return [replace(w, count=1) for w in machines.workers for _ in range(w.count)]


def _complete_plan(
    workflow: Workflow, demand: Demand, state: _PartialPlan, variants: Mapping[str, OperatorVariant], price: float, took_s: float
) -> ServicePlan:
    choices = []
    for op in workflow.operators:
        by_worker: dict[str, list[float]] = {}
        for w, x in state.shares[op.name]:
            by_worker.setdefault(w.name, []).append(x)
        shares = []
        for name, loads in by_worker.items():
            batch, seconds = max(variants[op.name].batches(name), key=lambda pair: pair[0] / pair[1])
            shares.append(WorkerShare(name, len(loads), sum(loads), batch, sum(loads) * seconds / batch / len(loads)))
        choices.append(VariantChoice(op.name, variants[op.name].name, tuple(shares)))
    accuracy = workflow.accuracy_of({name: v.name for name, v in variants.items()})
    return ServicePlan(demand, accuracy, tuple(choices), state.compute, price - state.compute, 0.0, inf, took_s)
