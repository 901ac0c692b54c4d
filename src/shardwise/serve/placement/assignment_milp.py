"""The cheapest placement of a workflow for a demand, as one mixed-integer linear programme (MILP) with a proven bound.

Variables: a variant for each operator, its number of workers of each kind, their load, and the traffic between tiers. Costs and constraints
are those of JellyBean (Wu et al., VLDB 2022, section 4): workers are paid for as a whole, traffic for each GiB that goes up a tier, none
goes down, and workers run one operator each (or several if shared).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import log

from shardwise.errors import Infeasible
from shardwise.serve.placement.milp import INFINITE, Milp, MilpSolution
from shardwise.serve.placement.workflow import Machines, RequestSource, WorkerGroup, Workflow, WorkflowOperator

GIB, HOUR_S = 2.0**30, 3600.0
UTILISATION_LEVELS = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # allowed utilisation of a worker if there is a latency target


@dataclass(frozen=True, slots=True)
class Demand:
    """`rate`: requests/s. `accuracy`: minimum. `latency_s`: target for `percentile` of requests, 0 for throughput alone.

    `allows_shared_workers`: whether a worker may run several operators. `max_spot_share`: of each operator's load on spot workers.
    """

    rate: float
    accuracy: float = 0.0
    latency_s: float = 0.0
    percentile: float = 0.95
    allows_shared_workers: bool = False
    max_spot_share: float = 1.0


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """Share of an operator on `machines` of a worker: `load` requests/s in batches of `batch`, at a `utilisation` from 0 to 1."""

    worker: str
    machines: float
    load: float
    batch: int
    utilisation: float


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """An operator's variant and the workers that run it."""

    operator: str
    variant: str
    shares: tuple[WorkerShare, ...]

    @property
    def load(self) -> float:
        return sum(share.load for share in self.shares)


@dataclass(frozen=True)
class ServicePlan:
    """A placement. Prices in dollars an hour; `latency_s`: at the demanded percentile, 0 without a target; `bound_gap`: relative gap to
    the lower bound of the price, 0 if proven optimal."""

    demand: Demand
    accuracy: float
    choices: tuple[VariantChoice, ...]
    compute_per_hour: float
    communication_per_hour: float
    latency_s: float = 0.0
    bound_gap: float = 0.0
    planning_time_s: float = field(default=0.0, compare=False)

    @property
    def price_per_hour(self) -> float:
        return self.compute_per_hour + self.communication_per_hour

    def choice(self, operator: str) -> VariantChoice:
        return next(c for c in self.choices if c.operator == operator)


@dataclass(frozen=True, slots=True)
class _WorkerOption:
    """A worker that runs a variant in batches of a size up to a utilisation. `column`: number of machines, which other options may share;
    `load`: requests/s of all of them."""

    operator: str
    variant: str
    worker: WorkerGroup
    batch: int
    capacity: float  # requests/s of one machine at 100 %
    max_utilisation: float
    latency_s: float
    column: int
    load: int


class _AssignmentProblem:
    """The MILP and the meaning of its columns."""

    def __init__(self, workflow: Workflow, machines: Machines, demand: Demand, is_rate_free: bool) -> None:
        self.workflow, self.machines, self.demand = workflow, machines, demand
        self.milp = Milp()
        most = min(_max_rate(op, machines) / workflow.rates[op.name] for op in workflow.operators)
        self.rate = self.milp.add_column(most, -1.0) if is_rate_free else self.milp.add_column(demand.rate, lower=demand.rate)
        self.price_factor = 0.0 if is_rate_free else 1.0
        self.variants = {(op.name, v.name): self.milp.add_column(1, integer=True) for op in workflow.operators for v in op.variants}
        self.tiers = sorted({w.tier for w in machines.workers})
        self.on_tier = {(op.name, t): self.milp.add_column(1, integer=True) for op in workflow.operators for t in self.tiers}
        self.used_machines = {
            w.name: self.milp.add_column(w.count, integer=True, cost=self.price_factor * w.price_per_hour) for w in machines.workers
        }
        self.options = [option for op in workflow.operators for option in self._options_of(op)]
        self.by_operator: dict[str, list[_WorkerOption]] = defaultdict(list)
        for option in self.options:
            self.by_operator[option.operator].append(option)
        self.traffic: list[tuple[int, float]] = []  # (column, dollars an hour for a request/s)
        self.zones = self._traffic_zones()
        require_accuracy(self.milp, workflow, demand.accuracy, self.variants)
        self._add_load_rows()
        self._add_tier_order_rows()
        for op in workflow.operators:
            for name, _ in op.inputs:
                self._add_flow_rows(name, op)
        if demand.latency_s:
            self._add_latency_rows()

    def _options_of(self, op: WorkflowOperator) -> Iterator[_WorkerOption]:
        for worker in self.machines.workers:
            machines = None
            for variant in op.variants:
                for batch, seconds, busy, latency in self._utilisation_options(variant.batches(worker.name)):
                    # One variant is chosen, so all share a column of machines; only with a latency target does the utilisation differ.
                    if machines is None or self.demand.latency_s:
                        machines = self.milp.add_column(worker.count, integer=not self.demand.allows_shared_workers)
                    load = self.milp.add_column(worker.count * batch / seconds * busy)
                    yield _WorkerOption(op.name, variant.name, worker, batch, batch / seconds, busy, latency, machines, load)

    def _utilisation_options(self, batches: tuple[tuple[int, float], ...]) -> Iterator[tuple[int, float, float, float]]:
        """Yield the Pareto-optimal (batch, its seconds, utilisation limit, latency) in latency and throughput."""
        if not self.demand.latency_s:
            if batches:
                batch, seconds = max(batches, key=lambda pair: pair[0] / pair[1])
                yield batch, seconds, 1.0, 0.0
            return
        options = [
            (batch, seconds, busy, percentile_latency_s(batch, seconds, busy, self.demand.percentile))
            for batch, seconds in batches
            for busy in UTILISATION_LEVELS
        ]
        best = 0.0
        for batch, seconds, busy, latency in sorted(options, key=lambda option: option[3]):
            if latency <= self.demand.latency_s and batch / seconds * busy > best:
                best = batch / seconds * busy
                yield batch, seconds, busy, latency

    def _add_load_rows(self) -> None:
        """Add rows: every request is computed once, by the chosen variant, on machines that exist and are paid for."""
        milp, rates = self.milp, self.workflow.rates
        of_worker: dict[str, dict[int, float]] = defaultdict(dict)
        for op in self.workflow.operators:
            options = self.by_operator[op.name]
            milp.add_row({**{o.load: 1.0 for o in options}, self.rate: -rates[op.name]}, 0, 0)
            for v in op.variants:
                of_variant = {o.load: 1.0 for o in options if o.variant == v.name}
                most = rates[op.name] * (self.demand.rate if self.price_factor else milp.upper[self.rate])
                milp.add_row({**of_variant, self.variants[op.name, v.name]: -most}, lower=0 if self.price_factor else -INFINITE, upper=0)
            if self.demand.max_spot_share < 1:
                spot = {o.load: 1.0 for o in options if o.worker.spot}
                milp.add_row({**spot, self.rate: -self.demand.max_spot_share * rates[op.name]}, upper=0)
        of_column: dict[int, list[_WorkerOption]] = defaultdict(list)
        for o in self.options:
            of_column[o.column].append(o)
        for column, options in of_column.items():
            worker = options[0].worker
            milp.add_row({**{o.load: 1 / (o.capacity * o.max_utilisation) for o in options}, column: -1.0}, upper=0)
            milp.add_row({column: 1.0, self.on_tier[options[0].operator, worker.tier]: -float(worker.count)}, upper=0)
            of_worker[worker.name][column] = 1.0
        for name, columns in of_worker.items():
            milp.add_row({**columns, self.used_machines[name]: -1.0}, upper=0)

    def _add_tier_order_rows(self) -> None:
        """Add rows: no traffic goes down a tier."""
        sources = {s.name: s for s in self.workflow.sources}
        for op in self.workflow.operators:
            for name, _ in op.inputs:
                for low in self.tiers:
                    if name in sources:
                        if low < sources[name].tier:
                            self.milp.add_row({self.on_tier[op.name, low]: 1.0}, 0, 0)
                        continue
                    for high in (t for t in self.tiers if t > low):
                        self.milp.add_row({self.on_tier[name, high]: 1.0, self.on_tier[op.name, low]: 1.0}, upper=1)

    def _traffic_zones(self) -> dict[str, tuple[object, ...]]:
        """Key of each worker's traffic zone: its tier and the prices of links from and to it."""
        zones: dict[str, tuple[object, ...]] = {}
        for w in self.machines.workers:
            outgoing = tuple((o.name, self.machines.link(w.name, w.tier, o)) for o in self.machines.workers if o.tier > w.tier)
            incoming = tuple((o.name, self.machines.link(o.name, o.tier, w)) for o in self.machines.workers if o.tier < w.tier)
            incoming += tuple((s.name, self.machines.link(s.name, s.tier, w)) for s in self.workflow.sources)
            prices = (tuple(link and (name, link.price_per_gib) for name, link in links) for links in (outgoing, incoming))
            zones[w.name] = (w.tier, *prices)
        return zones

    def _add_flow_rows(self, start: str, op: WorkflowOperator) -> None:
        """Add rows: flow of the requests of `op` from where their input is to where they are computed, a column each with traffic."""
        milp, rates, zones = self.milp, self.workflow.rates, self.zones
        source = next((s for s in self.workflow.sources if s.name == start), None)
        arriving: dict[object, dict[int, float]] = defaultdict(dict)
        ends: dict[object, list[_WorkerOption]] = defaultdict(list)
        for o in self.by_operator[op.name]:
            ends[zones[o.worker.name]].append(o)
        for zone, options in ends.items():
            arriving[zone] = {o.load: -1.0 for o in options}
        for name, tier, size, sent in self._flow_starts(start, source, rates[op.name]):
            leaving = dict(sent)
            for zone, options in ends.items():
                end = options[0].worker
                link = self.machines.link(name, tier, end)
                if end.tier < tier or (end.tier > tier and link is None):
                    continue
                price = link.price_per_gib if link is not None and end.tier > tier else 0.0
                dollars = price * size * HOUR_S / GIB
                column = milp.add_column(cost=self.price_factor * dollars)
                self.traffic.append((column, dollars))
                leaving[column] = 1.0
                arriving[zone][column] = 1.0
            milp.add_row(leaving, 0, 0)
        for columns in arriving.values():
            milp.add_row(columns, 0, 0)

    def _flow_starts(self, start: str, source: RequestSource | None, rate: float) -> Iterator[tuple[str, int, float, dict[int, float]]]:
        """Yield each origin of an input: (a worker or the source, tier, bytes of a message, minus its requests by column)."""
        if source is not None:
            yield source.name, source.tier, source.output_bytes, {self.rate: -rate}
            return
        ratio = rate / self.workflow.rates[start]
        groups: dict[tuple[str, object], list[_WorkerOption]] = defaultdict(list)
        for o in self.by_operator[start]:
            groups[o.variant, self.zones[o.worker.name]].append(o)
        for (variant, _), options in groups.items():
            size = self.workflow.operator(start).variant(variant).output_bytes
            yield options[0].worker.name, options[0].worker.tier, size, {o.load: -ratio for o in options}

    def _add_latency_rows(self) -> None:
        """Add rows: on every path from a source to an answer, the sum of latency percentiles and links is within the target."""
        milp, done = self.milp, {op.name: self.milp.add_column(self.demand.latency_s) for op in self.workflow.operators}
        most = 2 * self.demand.latency_s
        for op in self.workflow.operators:
            latency = milp.add_column(self.demand.latency_s)
            for o in self.by_operator[op.name]:
                used = milp.add_column(1, integer=True)
                milp.add_row({o.column: 1.0, used: -float(o.worker.count)}, upper=0)
                milp.add_row({latency: 1.0, used: -o.latency_s}, lower=0)
            for name, _ in op.inputs:
                parent = {done[name]: -1.0} if name in done else {}
                milp.add_row({done[op.name]: 1.0, latency: -1.0, **parent}, lower=0)
                for tier, end, hop in self._tier_hops(name):
                    at = {} if name not in done else {self.on_tier[name, tier]: -min(hop, most)}
                    least = -min(hop, most) * (1 if name in done else 0)
                    milp.add_row(
                        {done[op.name]: 1.0, latency: -1.0, **parent, **at, self.on_tier[op.name, end]: -min(hop, most)}, lower=least
                    )

    def _tier_hops(self, name: str) -> Iterator[tuple[int, int, float]]:
        """Yield (tier, higher tier, seconds of the largest message on the slowest link between them)."""
        source = next((s for s in self.workflow.sources if s.name == name), None)
        size = source.output_bytes if source is not None else max(v.output_bytes for v in self.workflow.operator(name).variants)
        starts = [(source.name, source.tier)] if source is not None else [(w.name, w.tier) for w in self.machines.workers]
        hops: dict[tuple[int, int], float] = {}
        for start, tier in starts:
            for end in self.machines.workers:
                link = self.machines.link(start, tier, end)
                if end.tier > tier and link is not None:
                    hop = link.latency_s + size / link.bandwidth_bytes_per_s
                    hops[tier, end.tier] = max(hops.get((tier, end.tier), 0.0), hop)
        yield from ((a, b, hop) for (a, b), hop in hops.items() if hop > 0)

    def initial_values(self, plan: ServicePlan) -> dict[int, float]:
        """Return values of the columns for the variants and machines of a placement, as a MILP start."""
        values = {self.rate: self.demand.rate}
        for choice in plan.choices:
            of_worker = {s.worker: float(s.machines) for s in choice.shares}
            variants = self.workflow.operator(choice.operator).variants
            values |= {self.variants[choice.operator, v.name]: float(v.name == choice.variant) for v in variants}
            values |= {o.column: of_worker.get(o.worker.name, 0.0) for o in self.by_operator[choice.operator]}
        return values

    def plan_from(self, solution: MilpSolution, took_s: float) -> ServicePlan:
        """Return the placement of a solution."""
        values = solution.values
        choices = []
        for op in self.workflow.operators:
            variant = max(op.variants, key=lambda v: values[self.variants[op.name, v.name]])
            used = [o for o in self.by_operator[op.name] if values[o.load] > 1e-9 and o.variant == variant.name]
            shares = []
            for o in used:
                machines = values[o.column] if self.demand.allows_shared_workers else round(values[o.column])
                shares.append(WorkerShare(o.worker.name, machines, values[o.load], o.batch, values[o.load] / (o.capacity * machines)))
            choices.append(VariantChoice(op.name, variant.name, tuple(shares)))
        compute = sum(round(values[self.used_machines[w.name]]) * w.price_per_hour for w in self.machines.workers)
        traffic = sum(values[column] * dollars for column, dollars in self.traffic)
        latency = self._latency_of(choices) if self.demand.latency_s else 0.0
        accuracy = self.workflow.accuracy_of({c.operator: c.variant for c in choices})
        gap = 0.0 if solution.proven else bound_gap_of(solution.objective, solution.bound)
        return ServicePlan(self.demand, accuracy, tuple(choices), compute, traffic, latency, gap, took_s)

    def _latency_of(self, choices: list[VariantChoice]) -> float:
        """Latency of the longest path, each operator at its slowest worker and that worker's utilisation."""
        done: dict[str, float] = {s.name: 0.0 for s in self.workflow.sources}
        by_name = {c.operator: c for c in choices}
        tiers = {c.operator: [self.machines.worker(s.worker).tier for s in c.shares] for c in choices}
        tiers |= {s.name: [s.tier] for s in self.workflow.sources}
        for op in self.workflow.operators:
            choice, variant = by_name[op.name], op.variant(by_name[op.name].variant)
            latency = max(
                percentile_latency_s(s.batch, dict(variant.batches(s.worker))[s.batch], s.utilisation, self.demand.percentile)
                for s in choice.shares
            )
            arrival_s = 0.0
            for name, _ in op.inputs:
                hops = [hop for a, b, hop in self._tier_hops(name) if a in tiers[name] and b in tiers[op.name]]
                arrival_s = max(arrival_s, done[name] + max(hops, default=0.0))
            done[op.name] = arrival_s + latency
        return max(done[name] for name in self.workflow.sinks)


def bound_gap_of(price: float, bound: float) -> float:
    """Relative gap of a price to its lower bound, as a plan's `bound_gap`; infinite without a bound.

    >>> bound_gap_of(3.0, 2.0), bound_gap_of(2.0, 2.0), bound_gap_of(1.0, 0.0)
    (0.5, 0.0, inf)
    """
    return max(0.0, price / bound - 1) if bound > 0 else float("inf")


def require_accuracy(milp: Milp, workflow: Workflow, minimum: float, variants: Mapping[tuple[str, str], int]) -> None:
    """Add rows that choose one variant of each operator with a minimum accuracy. `variants`: columns by operator and variant."""
    accuracy = workflow.accuracy
    for op in workflow.operators:
        milp.add_row({variants[op.name, v.name]: 1.0 for v in op.variants}, 1, 1)
    if not accuracy.table:
        if minimum > 0:
            pairs = ((op, v) for op in workflow.operators for v in op.variants)
            factors = {variants[op.name, v.name]: log(max(v.factor, 1e-300)) for op, v in pairs}
            milp.add_row(factors, lower=log(minimum / accuracy.base) - 1e-12)
        return
    rows = [(row, milp.add_column(1, integer=True)) for row, value in accuracy.table if value >= minimum]
    milp.add_row({column: 1.0 for _, column in rows}, 1, 1)
    for i, name in enumerate(accuracy.operators):
        for v in workflow.operator(name).variants:
            with_it = {column: 1.0 for row, column in rows if row[i] == v.name}
            milp.add_row({**with_it, variants[name, v.name]: -1.0}, 0, 0)


def _max_rate(op: WorkflowOperator, machines: Machines) -> float:
    """Requests/s of an operator if all workers ran it."""
    return sum(w.count * max((b / s for v in op.variants for b, s in v.batches(w.name)), default=0.0) for w in machines.workers)


def find_cheapest_plan(
    workflow: Workflow, machines: Machines, demand: Demand, limit_s: float = 60.0, start: ServicePlan | None = None
) -> ServicePlan | None:
    """Find the cheapest placement for a demand; None if there is none. Proven optimal unless it takes longer than `limit_s` seconds.

    `initial_values`: an initial placement, for demands without a latency target.

    Raises:
        Infeasible: `limit_s` seconds were too few to find any placement, or to rule it out.
    """
    begun = time.monotonic()
    problem = _AssignmentProblem(workflow, machines, demand, is_rate_free=False)
    solution = problem.milp.solve(limit_s, problem.initial_values(start) if start is not None else None)
    if not solution.values and not solution.proven:
        raise Infeasible(f"{limit_s:g} s were too few to find a placement, or to rule it out; give more with --within, or ask for less")
    return problem.plan_from(solution, time.monotonic() - begun) if solution.values else None


def solve_relaxation(workflow: Workflow, machines: Machines, demand: Demand, limit_s: float = 60.0) -> tuple[float, dict[str, str]]:
    """Solve the LP relaxation. Return (lower bound of the price, the variants closest to the relaxed solution); infinite and empty if
    nothing is feasible."""
    problem = _AssignmentProblem(workflow, machines, demand, is_rate_free=False)
    relaxed = problem.milp.solve(limit_s, is_relaxed=True)
    if not relaxed.values:
        return INFINITE, {}
    milp = Milp()
    columns = {key: milp.add_column(1, -relaxed.values[column], integer=True) for key, column in problem.variants.items()}
    require_accuracy(milp, workflow, demand.accuracy, columns)
    values = milp.solve(limit_s).values
    return relaxed.objective, {name: variant for (name, variant), column in columns.items() if values and values[column] > 0.5}


def find_highest_rate(
    workflow: Workflow, machines: Machines, demand: Demand, limit_s: float = 60.0, start: ServicePlan | None = None
) -> tuple[float, bool]:
    """Return the highest rate, in requests/s, of all machines together at any price, and whether it is proven optimal.

    `initial_values`: an initial placement at the demanded rate.
    """
    problem = _AssignmentProblem(workflow, machines, demand, is_rate_free=True)
    solution = problem.milp.solve(limit_s, problem.initial_values(start) if start is not None else None)
    return solution.values[problem.rate] if solution.values else 0.0, solution.proven


def percentile_latency_s(batch: int, batch_s: float, busy: float, percentile: float) -> float:
    """Seconds within which `percentile` (0 to 1) of requests are answered by a worker that is `busy` (0 to 1) with batches of `batch_s`.

    >>> percentile_latency_s(1, 0.1, 0.0, 0.95)
    0.1
    >>> round(percentile_latency_s(1, 0.1, 0.8, 0.95), 3)  # M/D/1
    0.793
    """
    if busy <= 0:
        return batch_s
    filling = (batch - 1) * batch_s / (busy * batch)  # the first request of a batch waits for the others
    if busy >= 1:
        return float("inf")
    mean = batch_s * busy / (1 - busy) / (2 * batch)
    waiting = mean / busy * log(busy / (1 - percentile)) if busy > 1 - percentile else 0.0
    return filling + waiting + batch_s
