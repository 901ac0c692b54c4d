"""The fastest plan. In: a graph, a cluster, a batch, constraints or a layout by hand. Out: a `Plan` with reasons and runners-up.

Every legal layout is priced in closed form; the best few are timed by the clock on the program that would run, and the fastest is
kept. A layout by hand goes the same way, alone. Not searched: shards other than those that propagation finds best, and stages
other than the most balanced.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from weft.cluster.cluster import Cluster
from weft.cost.memory import state_bytes
from weft.cost.step import Pricer, StageCost
from weft.errors import Infeasible, LayoutError, UsageError
from weft.model.graph import Graph
from weft.model.sharding import Shards
from weft.model.stages import links
from weft.plan.layout import Layout
from weft.plan.plan import Candidate, Plan, Prediction
from weft.plan.program import Compute, Op, Value
from weft.plan.timeline import Timeline
from weft.schedules import build
from weft.simulate.clock import simulate
from weft.solve.reasons import reasons
from weft.solve.space import layouts, parse_constraints
from weft.solve.stages import balance, useful

OBJECTIVES = ("time", "cost", "energy", "memory")
TIMED = 5  # candidates that the clock times
KEPT = 12  # candidates that the plan keeps
MOST_REFUSED = 4


@dataclass(frozen=True, slots=True)
class Priced:
    """A layout with its price and where its stages begin."""

    layout: Layout
    prediction: Prediction
    sites: tuple[str, ...]
    costs: tuple[StageCost, ...]


def search(
    graph: Graph,
    cluster: Cluster,
    batch_size: int,
    model: str,
    constraints: str = "",
    layout: Layout | None = None,
    objective: str = "time",
    *,
    shards: Mapping[str, Shards] | None = None,
    stages: Sequence[str] = (),
    optimizer_states: int = 2,
) -> Plan:
    """Choose a plan for `batch_size` samples a step, or price `layout` as it is (with `shards` and `stages` where they are given).

    Args:
        constraints: text as `parse_constraints` reads it. objective: time, cost (device hours), energy (the same, in power), memory.

    Raises:
        Infeasible: no layout meets the constraints, or none fits the memory; with the numbers and what would.
        UsageError: an unknown objective, constraint or batch.
    """
    began = time.perf_counter()
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} samples; use 1 or more")
    if objective not in OBJECTIVES:
        raise UsageError(f"unknown objective {objective}; use one of {', '.join(OBJECTIVES)}")
    limits = parse_constraints(constraints)
    pricer = Pricer(graph, cluster, batch_size, optimizer_states, shards)
    refused: list[Candidate] = []
    fitting: list[Priced] = []
    leanest: Priced | None = None
    space = [layout] if layout is not None else list(layouts(cluster, batch_size, limits, len(pricer.cuts) + 1))
    for one in space:
        if one.recompute == "full" and layout is None and _fits_without(one, fitting):
            continue
        try:
            check_layout(one, cluster, batch_size)
            if layout is None:
                _check_state(one, cluster, graph.num_parameters)
            priced = price(pricer, one, stages)
        except (Infeasible, LayoutError) as error:
            if layout is not None:
                raise
            refused.append(Candidate(one, None, str(error)))
            continue
        if leanest is None or priced.prediction.memory.total < leanest.prediction.memory.total:
            leanest = priced
        try:
            pricer.check_memory(one, priced.prediction)
        except Infeasible as error:
            if layout is not None:
                raise
            refused.append(Candidate(one, priced.prediction, str(error)))
            continue
        fitting.append(priced)
    if not fitting:
        if leanest is None and space:
            leanest = _least_state(pricer, space, cluster, batch_size)
        raise _nothing(cluster, batch_size, constraints, len(space), leanest, refused)
    fitting.sort(key=lambda p: _score(p, cluster, objective))
    timed = sorted((clocked(pricer, p) for p in fitting[:TIMED]), key=lambda p: _score(p, cluster, objective))
    best = timed[0]
    candidates = [Candidate(p.layout, p.prediction) for p in (*timed, *fitting[TIMED:])]
    shown = _spread(candidates)
    refused.sort(key=lambda c: (_differences(c.layout, best.layout), c.prediction.step_time_s if c.prediction else float("inf")))
    sharding = pricer.sharding(best.layout)
    cut = () if sharding is None else tuple((axis, names) for axis, names in sharding.shards.items() if axis != "data" and names)
    return Plan(
        best.layout,
        model,
        cluster.name,
        batch_size,
        best.sites,
        cut,
        best.prediction,
        reasons(best.layout, best.prediction, candidates, refused, cluster, by_hand=layout is not None),
        (*shown, *refused[:MOST_REFUSED]),
        () if sharding is None else sharding.replicated,
        planning_time_s=time.perf_counter() - began,
    )


def without_graph(
    num_parameters: int, why: str, cluster: Cluster, batch_size: int, model: str, constraints: str = "", layout: Layout | None = None
) -> Plan:
    """A plan for a model that could not be captured, for the reason `why`: data parallelism, ZeRO-1 where replicas do not fit.

    Nothing is known of its compute, so nothing is predicted: as many data replicas as divide the batch.

    Raises:
        Infeasible: constraints or a layout that ask for tensor or pipeline, or a model that does not fit.
    """
    limits = parse_constraints(constraints)
    plain = {"tensor": 1, "pipeline": 1, "microbatches": 1, "recompute": "none"}
    every = layouts(cluster, batch_size, limits)
    found = [one for one in every if all(getattr(one, k) == v for k, v in plain.items())] if layout is None else [layout]
    if not found:
        raise Infeasible(f"{model} could not be captured ({why}), so only data and zero apply, and {constraints!r} leaves nothing of them")
    for one in found:
        if one.tensor > 1 or one.pipeline > 1:
            raise Infeasible(f"{one}: this model could not be captured ({why}), so only data and zero apply; use tensor=1 pipeline=1")
        if one.recompute != "none":
            raise Infeasible(f"{one}: this model could not be captured ({why}), so its layers are not known; use recompute=none")
        check_layout(one, cluster, batch_size)
        if state_bytes(num_parameters, one.zero, one.data) < cluster.memory_of(one.num_ranks):
            said = f"data={one.data}: as many replicas as there are devices and as divide the batch of {batch_size}; nothing else applies"
            return Plan(one, model, cluster.name, batch_size, reasons=(("data", said), ("capture", why)), uncaptured=why)
    need, have = 8.0 * num_parameters, cluster.memory_of(1)
    raise Infeasible(
        f"{model} could not be captured ({why}), and by data parallelism it does not fit: its state needs at least {need / 2**30:.2f} GiB "
        f"a device, which has {have / 2**30:.2f} GiB"
    )


def check_layout(layout: Layout, cluster: Cluster, batch_size: int) -> None:
    """Raise `Infeasible` where the layout cannot be on this cluster or with this batch, with the numbers and the remedy."""
    if layout.num_ranks > cluster.num_devices and not cluster.is_cpu:
        raise Infeasible(f"{layout} needs {layout.num_ranks} devices, {cluster.name} has {cluster.num_devices}; make an axis smaller")
    ways = layout.data * layout.microbatches
    if batch_size % ways:
        near = max(1, batch_size // ways) * ways
        raise Infeasible(
            f"a batch of {batch_size} samples does not divide into data={layout.data} x microbatches={layout.microbatches}; "
            f"use a multiple of {ways} such as {near}"
        )
    cluster.device.peak(layout.precision)


def price(pricer: Pricer, layout: Layout, sites: Sequence[str] = ()) -> Priced:
    """The layout's price in closed form, its stages balanced where `sites` does not give them.

    Raises:
        Infeasible: more stages than the model has places for. LayoutError: sites or shards that the model does not have.
    """
    if layout.pipeline > 1 and len(sites) != layout.pipeline - 1:
        sites = balanced(pricer, layout)
    costs = pricer.stages(layout, tuple(sites) if layout.pipeline > 1 else ())
    return Priced(layout, pricer.predict(layout, costs, _borders(pricer, layout, sites)), tuple(sites[: layout.pipeline - 1]), costs)


def balanced(pricer: Pricer, layout: Layout) -> tuple[str, ...]:
    """Where the most balanced stages begin; the same whatever the schedule, ZeRO stage and recomputation."""
    key = (layout.data, layout.tensor, layout.pipeline, layout.microbatches, layout.precision, layout.threads, layout.sequence_parallel)
    if key not in pricer.balanced:
        pricer.balanced[key] = _balance(pricer, layout)
    return pricer.balanced[key]


def _balance(pricer: Pricer, layout: Layout) -> tuple[str, ...]:
    p = layout.pipeline
    places = pricer.cuts
    if len(places) < p - 1:
        raise Infeasible(f"pipeline={p} but the model can be cut in {len(places)} places; use pipeline<={len(places) + 1}")
    tried = useful(places, p - 1)
    compute, collectives = pricer.operators(layout)
    ends = [0, *(c.index for c in tried), len(compute)]
    seconds = [a.total + b.total for a, b in zip(compute, collectives, strict=True)]
    units = [sum(seconds[a:b]) for a, b in pairwise(ends)]
    crossings = [2 * pricer.transfer_s(layout, pricer.crossing(layout, c.values)) for c in tried]
    starts, _ = balance(units, crossings, p)
    return tuple(tried[i - 1].site for i in starts)


def _borders(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> list[float]:
    if layout.pipeline == 1:
        return []
    return [sum(pricer.transfer_s(layout, pricer.crossing(layout, v)) for _, v in stage.sends) for stage in pricer.split(sites)[:-1]]


def clocked(pricer: Pricer, priced: Priced) -> Priced:
    """The same with its pipeline timed by the clock on the program that would run."""
    if priced.layout.pipeline == 1:
        return priced
    pipeline_s = timeline(pricer, priced).total_s
    return replace(priced, prediction=pricer.predict(priced.layout, priced.costs, (), pipeline_s))


def timeline(pricer: Pricer, priced: Priced) -> Timeline:
    """Forward and backward of one step, by the clock, on the program that would run."""
    layout = priced.layout
    stages = pricer.split(priced.sites)
    program = build(layout.schedule, layout.pipeline, layout.microbatches, links(stages), rendezvous=False)
    sent = {(s.index, to): pricer.transfer_s(layout, pricer.crossing(layout, values)) for s in stages for to, values in s.sends}

    def compute_s(action: Compute) -> float:
        cost = priced.costs[action.stage]
        return cost.forward_s if action.op is Op.F else cost.backward_s

    def transfer_s(value: Value, sender: int, receiver: int) -> float:
        return sent.get((min(value.index[0], value.index[1]), max(value.index[0], value.index[1])), 0.0)

    return simulate(program, compute_s, transfer_s)


def _check_state(layout: Layout, cluster: Cluster, num_parameters: int) -> None:
    """Refuse, before anything is priced, a layout whose weights, gradients and optimizer alone cannot fit."""
    have = cluster.memory_of(layout.num_ranks)
    least = state_bytes(num_parameters, layout.zero, layout.data) / (layout.tensor * layout.pipeline)
    if least > have:
        raise Infeasible(
            f"{layout}: weights, gradients and optimizer need at least {least / 2**30:.2f} GiB a device, which has {have / 2**30:.2f} GiB"
        )


def _least_state(pricer: Pricer, space: Sequence[Layout], cluster: Cluster, batch_size: int) -> Priced | None:
    """The layout with the least state that can be priced, for saying how far from fitting it is."""
    number = pricer.graph.num_parameters

    def size(layout: Layout) -> tuple[float, int]:
        return state_bytes(number, layout.zero, layout.data) / (layout.tensor * layout.pipeline), -layout.microbatches

    for layout in sorted(space, key=size)[:8]:
        try:
            check_layout(layout, cluster, batch_size)
            return price(pricer, layout)
        except (Infeasible, LayoutError):
            continue
    return None


def _fits_without(layout: Layout, fitting: Sequence[Priced]) -> bool:
    """Recomputing costs time and saves memory only: no need where the layout just before fits without."""
    return any(p.layout == replace(layout, recompute="none") for p in fitting[-8:])


def _score(priced: Priced, cluster: Cluster, objective: str) -> tuple[float, ...]:
    # Three digits: below that the simpler layout and the leaner one wins.
    seconds = float(f"{priced.prediction.step_time_s:.3g}")
    if objective == "memory":
        return (priced.prediction.memory.total, seconds)
    if objective in ("cost", "energy"):
        cores = cluster.threads_of(priced.layout.num_ranks, priced.layout.threads) or 1
        return (seconds * priced.layout.num_ranks * cores, seconds)
    return (seconds, priced.layout.num_ranks, priced.layout.microbatches, priced.prediction.memory.total)


def _differences(one: Layout, other: Layout) -> int:
    """Keys in which two layouts differ."""
    return sum(getattr(one, f.name) != getattr(other, f.name) for f in fields(Layout))


def _spread(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best few, and the best of every (data, tensor, pipeline, precision), so that every choice can be compared."""
    found = list(candidates[:3])
    seen = {(c.layout.data, c.layout.tensor, c.layout.pipeline, c.layout.precision) for c in found}
    for candidate in candidates[3:]:
        key = (candidate.layout.data, candidate.layout.tensor, candidate.layout.pipeline, candidate.layout.precision)
        if key not in seen and len(found) < KEPT:
            seen.add(key)
            found.append(candidate)
    return found


def _nothing(
    cluster: Cluster, batch_size: int, constraints: str, tried: int, leanest: Priced | None, refused: Sequence[Candidate]
) -> Infeasible:
    said = f" under {constraints!r}" if constraints else ""
    if leanest is None:
        why = f": {refused[0].note}" if refused else "; every one is excluded"
        return Infeasible(
            f"no layout of {cluster.num_devices} devices for a batch of {batch_size}{said}{why}. Drop a constraint, or change the batch"
        )
    have, need = cluster.memory_of(leanest.layout.num_ranks), leanest.prediction.memory
    state = need.parameters + need.gradients + need.optimizer
    more = -(-need.total * leanest.layout.num_ranks // have)
    return Infeasible(
        f"none of {tried} layouts fits {cluster.name}{said}: the leanest, {leanest.layout}, needs {need.total / 2**30:.2f} GiB on its "
        f"fullest device ({state / 2**30:.2f} for weights, gradients and optimizer, {need.activations / 2**30:.2f} for activations), "
        f"which has {have / 2**30:.2f} GiB; use about {more:.0f} such devices, or a smaller batch or model"
    )
