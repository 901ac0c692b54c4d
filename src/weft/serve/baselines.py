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

from weft.errors import Infeasible
from weft.serve.assign import GIB, HOUR_S, Ask, Choice, Placed, Share, accurate_enough, cheapest
from weft.serve.milp import Milp
from weft.serve.workflow import Link, Machines, Operator, Variant, Worker, Workflow

BEAM, ORDERS, STATES = 10, 10, 10  # JellyBean's own configuration


def two_steps(
    workflow: Workflow, machines: Machines, ask: Ask, beam: int = BEAM, orders: int = ORDERS, states: int = STATES
) -> Placed | None:
    """Find a placement by JellyBean's beam search; None if it finds none."""
    begun, workers = time.monotonic(), _single(machines)
    best: tuple[float, _State, dict[str, Variant]] | None = None
    for variants in islice(_accurate(workflow, machines, ask.accuracy), beam):
        for order in islice(_orders(workflow, ()), orders):
            for state in _assigned(_Case(workflow, machines, ask, variants), order, workers, states):
                if best is None or state.price < best[0]:
                    best = state.price, state, variants
    if best is None:
        return None
    price, state, variants = best
    return _placed(workflow, ask, state, variants, price, time.monotonic() - begun)


def greedy(workflow: Workflow, machines: Machines, ask: Ask) -> Placed | None:
    """Find a placement greedily: the cheapest accurate variants, in one topological order, each operator at its least price."""
    return two_steps(workflow, machines, ask, 1, 1, 1)


def one_size(workflow: Workflow, machines: Machines, ask: Ask, limit_s: float = 60.0) -> Placed | None:
    """Find the cheapest placement of the most accurate variants in the highest tier."""
    top = max(w.tier for w in machines.workers)
    top_machines = Machines(tuple(w for w in machines.workers if w.tier == top), _within(machines, top))
    try:
        return cheapest(workflow, top_machines, replace(ask, accuracy=max(workflow.levels())), limit_s)
    except Infeasible:  # not found in time
        return None


def _within(machines: Machines, top: int) -> tuple[Link, ...]:
    names = {w.name for w in machines.workers if w.tier < top}
    return tuple(link for link in machines.links if not {link.start, link.end} & names)


@dataclass(frozen=True)
class _Case:
    workflow: Workflow
    machines: Machines
    ask: Ask
    variants: Mapping[str, Variant]

    def capacity(self, op: Operator, worker: Worker) -> float:
        """Requests/s of one machine; 0 if it cannot run the variant."""
        return max((b / seconds for b, seconds in self.variants[op.name].batches(worker.name)), default=0.0)

    def traffic(self, op: Operator, worker: Worker, load: float, shares: Mapping[str, tuple[tuple[Worker, float], ...]]) -> float:
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
class _State:
    price: float
    compute: float
    shares: Mapping[str, tuple[tuple[Worker, float], ...]]
    free: frozenset[int]


def _assigned(case: _Case, order: tuple[Operator, ...], workers: list[Worker], keep: int) -> list[_State]:
    """Return complete assignments, cheapest first, by a beam search that assigns operators in `order`."""
    states = [_State(0.0, 0.0, {}, frozenset(range(len(workers))))]
    tiers = sorted({w.tier for w in workers})
    for op in order:
        load = case.workflow.rates[op.name] * case.ask.rate
        extended = []
        for state in states:
            below = max((max(w.tier for w, _ in state.shares[name]) for name, _ in op.inputs if name in state.shares), default=0)
            for top in (t for t in tiers if t >= below):
                candidates = [i for i in sorted(state.free) if below <= workers[i].tier <= top and case.capacity(op, workers[i]) > 0]
                chosen = _filled(case, op, load, workers, candidates, state.shares)
                if chosen is None:
                    continue
                shares = tuple((workers[i], x) for i, x in chosen)
                compute = sum(w.price_per_hour for w, _ in shares)
                traffic = sum(case.traffic(op, w, x, state.shares) for w, x in shares)
                if traffic < inf:
                    free = state.free - {i for i, _ in chosen}
                    extended.append(
                        _State(state.price + compute + traffic, state.compute + compute, {**state.shares, op.name: shares}, free)
                    )
        states = sorted(extended, key=lambda s: s.price)[:keep]
    return states


def _filled(
    case: _Case, op: Operator, load: float, workers: list[Worker], there: list[int], shares: Mapping[str, tuple[tuple[Worker, float], ...]]
) -> list[tuple[int, float]] | None:
    """Choose workers until they carry the load: the cheapest worker of the lowest tier that carries the rest alone, else the one with the
    least price a request. Return (worker, load), None if the load does not fit."""
    chosen: list[tuple[int, float]] = []
    rest, waiting = load, list(there)
    unit = {i: case.traffic(op, workers[i], 1.0, shares) for i in there}
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


def _accurate(workflow: Workflow, machines: Machines, accuracy: float) -> Iterator[dict[str, Variant]]:
    """Yield choices of variants that are accurate enough, by the mean cost of their requests over workers (unknown costs last)."""

    def cost(v: Variant) -> float:
        costs = [(machines.worker(name).price_per_hour * batches[0][1]) for name, batches in v.latency_s if batches]
        return sum(costs) / len(costs) if costs else 1e6

    milp = Milp()
    columns = {(op.name, v.name): milp.column(1, cost(v), integer=True) for op in workflow.operators for v in op.variants}
    accurate_enough(milp, workflow, accuracy, columns)
    while values := milp.solve().values:
        choice = {op.name: next(v for v in op.variants if values[columns[op.name, v.name]] > 0.5) for op in workflow.operators}
        yield choice
        milp.row({columns[name, v.name]: 1.0 for name, v in choice.items()}, most=len(choice) - 1)  # exclude this choice


def _orders(workflow: Workflow, done: tuple[Operator, ...]) -> Iterator[tuple[Operator, ...]]:
    """Yield the topological orders of the operators."""
    if len(done) == len(workflow.operators):
        yield done
        return
    ready = {op.name for op in done} | {s.name for s in workflow.sources}
    for op in workflow.operators:
        if op not in done and all(name in ready for name, _ in op.inputs):
            yield from _orders(workflow, (*done, op))


def _single(machines: Machines) -> list[Worker]:
    return [replace(w, count=1) for w in machines.workers for _ in range(w.count)]


def _placed(workflow: Workflow, ask: Ask, state: _State, variants: Mapping[str, Variant], price: float, took_s: float) -> Placed:
    choices = []
    for op in workflow.operators:
        by_worker: dict[str, list[float]] = {}
        for w, x in state.shares[op.name]:
            by_worker.setdefault(w.name, []).append(x)
        shares = []
        for name, loads in by_worker.items():
            batch, seconds = max(variants[op.name].batches(name), key=lambda pair: pair[0] / pair[1])
            shares.append(Share(name, len(loads), sum(loads), batch, sum(loads) * seconds / batch / len(loads)))
        choices.append(Choice(op.name, variants[op.name].name, tuple(shares)))
    accuracy = workflow.accuracy_of({name: v.name for name, v in variants.items()})
    return Placed(ask, accuracy, tuple(choices), state.compute, price - state.compute, 0.0, inf, took_s)
