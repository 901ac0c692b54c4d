"""Price of one layout: its balanced stages, its prediction in closed form, and its step time simulated on its own program.

Where the most balanced stages do not fit their devices, the best that do are found, each with the microbatches that its position in the
schedule keeps in flight. Not modelled: what `weft.cost` and `weft.simulate` do not model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from weft import schedules
from weft.cost.memory.memory import MARGIN
from weft.cost.network.network import send_s
from weft.cost.stages.base import handed_s
from weft.cost.step import Pricer, StageCost
from weft.errors import Infeasible
from weft.model.stages.stages import Cut, Stage, links
from weft.plan.choice import AUTO
from weft.plan.layout import Layout
from weft.plan.microbatches import sizes_of_plan
from weft.plan.plan import Prediction
from weft.plan.program import Compute, Links, Manage, ManageOp, Value
from weft.plan.timeline import STEP_LANE, Span, Timeline
from weft.simulate.clock import simulate
from weft.simulate.makespan import Times, makespan_s
from weft.solve.balance import arrange, balance, runs_bytes, runs_s
from weft.solve.handing import waited_part
from weft.solve.lending import LEAST_GAIN, Lent, compute_seconds, lent_seconds, may_lend
from weft.solve.mixed import MixedPricer, memory_of, owner
from weft.solve.stage_starts import useful

Seconds2 = NDArray[np.float64]
MOST_LENT = 4_000  # computes of a step, at most, for which lending is simulated
FLOPS_A_BYTE = 20.0  # that take as long as a byte of memory traffic: about 5 on CPUs, 100 on GPUs; only for stage boundaries
PERIODIC = 4  # times the ranks: microbatches after which a schedule is periodic


@dataclass(frozen=True, slots=True)
class Priced:
    """A layout with its price and the sites of its stages. `remainder_costs`: as `costs`, of the smaller of unequal microbatches."""

    layout: Layout
    prediction: Prediction
    sites: tuple[str, ...]
    costs: tuple[StageCost, ...]
    smaller: tuple[StageCost, ...] = ()


def price(pricer: Pricer, layout: Layout, sites: Sequence[str] = ()) -> Priced:
    """Price the layout in closed form, its stages balanced where `sites` does not give them.

    Raises:
        Infeasible: more stages than the model has places for. LayoutError: sites or shards that the model does not have.
        ProgramError: a custom schedule that is refuted.
    """
    if layout.num_stages > 1 and len(sites) != layout.num_stages - 1:
        sites = balanced(pricer, layout)
    sites = tuple(sites) if layout.num_stages > 1 else ()
    schedules.check_custom(layout, links(pricer.split(sites)))
    costs = _stages_of(pricer, layout, sites)
    boundaries = [sum(_hand_over_s(pricer, layout, stage, to, values) for to, values in stage.sends) for stage in pricer.split(sites)[:-1]]
    _, remainder_pricer = pricer.smaller(layout)
    smaller = _stages_of(remainder_pricer, layout, sites) if remainder_pricer is not None else ()
    return Priced(layout, pricer.predict(layout, costs, boundaries, smaller=smaller), sites, costs, smaller)


def _stages_of(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> tuple[StageCost, ...]:
    if not layout.inner:
        return pricer.stages(layout, sites)
    return tuple(pricer.stages(layout.of_stage(s), sites, only=(s,))[0] for s in range(layout.num_stages))


def balanced(pricer: Pricer, layout: Layout) -> tuple[str, ...]:
    """Return the sites where the most balanced stages begin; the same whatever the schedule, ZeRO stage and recomputation."""
    key = (
        layout.axes, layout.num_stages, layout.microbatches, layout.precision, layout.threads, layout.sequence_parallel,
        layout.sample_parallel, layout.attention, layout.batch_norm, layout.shares, layout.inner,
    )  # fmt: skip
    if key not in pricer.balanced:
        tried = places(pricer, layout)
        are_unequal = layout.inner or (isinstance(pricer, MixedPricer) and pricer.aligned(layout))
        if are_unequal or len(set(_borders(pricer, layout))) > 1:
            starts, _ = arrange(_stages_s(pricer, layout, tried))
        else:
            units = unit_seconds(pricer, layout, tried).sum(axis=0)
            starts, _ = balance(units.tolist(), crossings_s(pricer, layout, tried), layout.num_stages)
        pricer.balanced[key] = tuple(tried[i - 1].site for i in starts)
    return pricer.balanced[key]


def fitted(pricer: Pricer, layout: Layout) -> Priced:
    """Price the layout with the most balanced of those stages that each fit their device, by the memory of their layers.

    Raises:
        Infeasible: there are none.
    """
    tried = places(pricer, layout)
    memory = _unit_memory(pricer, layout, tried)
    seconds = [
        np.where(size <= memory_of(pricer, layout, k), stage_s, np.inf)
        for k, (stage_s, size) in enumerate(zip(_stages_s(pricer, layout, tried), memory, strict=True))
    ]
    starts, _ = arrange(seconds)
    return price(pricer, layout, tuple(tried[i - 1].site for i in starts))


def _stages_s(pricer: Pricer, layout: Layout, tried: Sequence[Cut]) -> list[NDArray[np.float64]]:
    """Seconds of a stage of units i to j - 1, at [stage][i, j], on the devices of that stage, with its own boundaries."""
    if layout.inner:
        return _differing_s(pricer, layout, tried)
    cache: dict[tuple[int, int, int], NDArray[np.float64]] = {}
    crossing: dict[tuple[int, int], list[float]] = {}
    distances = _borders(pricer, layout)
    rows = []
    for k in range(layout.num_stages):
        part, ends = owner(pricer, layout, k), (distances[max(0, k - 1)], distances[min(k, len(distances) - 1)])
        if (id(part), *ends) not in cache:
            for distance in ends:
                if (id(part), distance) not in crossing:
                    at = distances.index(distance)
                    crossing[id(part), distance] = crossings_s(part, layout, tried, at % layout.pipeline, (at + 1) % layout.pipeline)
            units = unit_seconds(part, layout, tried).sum(axis=0).tolist()
            cache[(id(part), *ends)] = runs_s(units, *(crossing[id(part), distance] for distance in ends))
        rows.append(cache[(id(part), *ends)])
    return rows


def _differing_s(pricer: Pricer, layout: Layout, tried: Sequence[Cut]) -> list[NDArray[np.float64]]:
    """Seconds as of `_stage_times_s`, of stages that each arrange their ranks differently, on devices of their own."""
    last, rows = layout.num_stages - 1, []
    sizes = [pricer.crossing(layout, cut.values) for cut in tried]
    boundary_s = []
    for k in range(last):
        seconds = {size: 2 * _border_s(pricer, layout, k, k + 1, size) for size in set(sizes)}
        boundary_s.append([seconds[size] for size in sizes])
    for k in range(layout.num_stages):
        inner = layout.of_stage(k)
        pricer.sharding(inner)  # cached once, and shared by the pricers of all parts
        units = unit_seconds(owner(pricer, layout, k), inner, tried).sum(axis=0).tolist()
        rows.append(runs_s(units, boundary_s[max(0, k - 1)], boundary_s[min(k, last - 1)]))
    return rows


def _borders(pricer: Pricer, layout: Layout) -> list[int]:
    """Rank distance of each stage to the next, with chunks one after the other, whatever the schedule."""
    p = layout.pipeline
    return [pricer.apart(layout, s % p, (s + 1) % p) for s in range(layout.num_stages - 1)]


def places(pricer: Pricer, layout: Layout) -> list[Cut]:
    """Return the cuts that are worth trying as stage boundaries.

    Raises:
        Infeasible: fewer of them than stages need.
    """
    p, cuts = layout.num_stages, pricer.cuts_of(layout)
    if len(cuts) < p - 1:
        at = f"pipeline={layout.pipeline}" + (f" chunks={layout.chunks}" if layout.chunks > 1 else "")
        stages = len(cuts) + 1
        most = f"pipeline<={stages}" if layout.chunks == 1 else f"a schedule with one stage a rank (1f1b), and pipeline<={stages}"
        raise Infeasible(f"{at} but the model can be cut in {len(cuts)} places; use {most}")
    # With several stages a rank there are many: those where least crosses, if they suffice.
    least = p - 1 if layout.chunks == 1 else p // 2
    if cuts is not pricer.cuts:
        return useful(cuts, least, _work(pricer))
    if least not in pricer.places:
        pricer.places[least] = useful(cuts, least, _work(pricer))
    return pricer.places[least]


def _work(pricer: Pricer) -> list[float]:
    """Work of every operator, forward and backward: its FLOPs, and its memory traffic at a rate between those of devices."""
    works = (pricer.inventory.works[op.name] for op in pricer.graph.operators)
    return [w.flops + w.backward_flops + FLOPS_A_BYTE * (w.bytes + w.backward_bytes) for w in works]


def unit_seconds(pricer: Pricer, layout: Layout, tried: Sequence[Cut]) -> Seconds2:
    """Seconds of one microbatch, rows forward and backward, of the operators between `cuts`: shape [2, cuts + 1]."""
    forward, backward, out, back = pricer.operator_seconds(layout)
    rows = np.stack([forward + out, backward + back])
    sums = np.concatenate([np.zeros((2, 1)), np.cumsum(rows, axis=1)], axis=1)
    ends = np.array([0, *(cut.index for cut in tried), rows.shape[1]])
    return cast(Seconds2, np.diff(sums[:, ends], axis=1))


def crossings_s(pricer: Pricer, layout: Layout, tried: Sequence[Cut], here: int = 0, there: int = 1) -> list[float]:
    """Seconds that the boundary between two pipeline positions costs at each cut for one microbatch, both ways."""
    tensors, batched = pricer.graph.tensors, pricer.inventory.batched
    cache: dict[tuple[tuple[int, bool], ...], float] = {}
    seconds = []
    for cut in tried:
        key = tuple([(tensors[v].size_bytes, v in batched) for v in cut.values])
        if key not in cache:
            cache[key] = 2 * pricer.transfer_s(layout, pricer.crossing(layout, cut.values), here, there)
        seconds.append(cache[key])
    return seconds


def _hand_over_s(pricer: Pricer, layout: Layout, stage: Stage, to: int, values: Sequence[str]) -> float:
    """Seconds to send `values` of one microbatch from a stage to another; nothing within a rank."""
    ranks_of = schedules.schedule_of(layout).ranks_of
    if ranks_of[stage.index][0] == ranks_of[to][0]:
        return 0.0
    if layout.inner or isinstance(pricer, MixedPricer):
        return _border_s(pricer, layout, stage.index, to, pricer.crossing(layout, values))
    return handed_s(pricer, layout, stage.index, to, values)


def _border_s(pricer: Pricer, layout: Layout, here: int, to: int, size_bytes: float) -> float:
    """Seconds to send one microbatch's `size_bytes` from a stage to another, on a heterogeneous cluster or to one with another arrangement.
    Then every rank sends an equal part, each element once, and tensor ranks that need it whole gather it; so do all where stages have
    unequal numbers of ranks."""
    from_layout, to_layout = layout.of_stage(here), layout.of_stage(to)
    reshards = from_layout != to_layout or bool(layout.begins)
    if isinstance(pricer, MixedPricer):
        sent = pricer.border_s(from_layout, here, to, size_bytes)
    elif reshards and not layout.begins:
        sent = send_s(pricer.cluster, size_bytes / layout.stage_ranks, layout.stage_ranks, layout.stage_ranks)
    else:
        sent = pricer.transfer_s(from_layout, size_bytes, here, to)
    if not reshards or to_layout.tensor == 1:
        return sent
    receiver = owner(pricer, layout, to)
    return sent + receiver.collective("all_gather", size_bytes / to_layout.data, receiver.group(to_layout, "tensor"))


def sends_s(pricer: Pricer, priced: Priced) -> dict[tuple[int, int], float]:
    """Seconds of one microbatch on every link (producer stage, consumer stage)."""
    stages = pricer.split(priced.sites)
    return {(s.index, to): _hand_over_s(pricer, priced.layout, s, to, values) for s in stages for to, values in s.sends}


def clocked(pricer: Pricer, priced: Priced, *, in_full: bool = True) -> Priced:
    """Return the layout with its pipeline simulated on the program that would run, and with cores lent where that pays.

    `is_full=False`: of a step of many microbatches only a part is simulated. Schedules are periodic in p or 2p of them, so the steady-state
    time of 2p more is extrapolated. That is exact for equal stages. Where a rank a little slower than the others has not yet used up
    the head start that its schedule gives it, that is too little, and the slowest rank's own work is the better bound; the remaining
    error is up to 1 % too little, never too much.
    """
    timed = _timed(pricer, priced, in_full)
    if not may_lend(pricer.cluster, priced.layout) or (priced.layout.lend == AUTO and _actions(priced.layout) > MOST_LENT):
        return timed
    lending = replace(priced, layout=replace(priced.layout, lend="on"))
    total = timeline(pricer, lending).total_s
    lending = replace(lending, prediction=pricer.predict(lending.layout, lending.costs, (), total, lending.smaller))
    pays = lending.prediction.step_time_s < (1 - LEAST_GAIN) * timed.prediction.step_time_s
    return lending if pays or priced.layout.lend == "on" else timed


def _actions(layout: Layout) -> int:
    """Number of computes of a step, each way as one."""
    return 2 * layout.num_stages * layout.microbatches


def _timed(pricer: Pricer, priced: Priced, in_full: bool) -> Priced:
    layout = priced.layout
    if layout.actions and schedules.schedule_of(layout).manages:
        return replace(priced, prediction=pricer.predict(layout, priced.costs, (), timeline(pricer, priced).total_s, priced.smaller))
    if layout.pipeline == 1:
        return priced
    in_full = in_full or bool(layout.actions)  # custom schedules are for one number of microbatches
    connected = links(pricer.split(priced.sites))
    times = _times(priced.costs, sends_s(pricer, priced))
    num_remainder, remainder_pricer = pricer.smaller(layout)
    remainder: tuple[int, Times] | None = None
    if remainder_pricer is not None:
        remainder = layout.microbatches - num_remainder, _times(priced.smaller, sends_s(remainder_pricer, priced))

    def seconds(microbatches: int) -> float:
        return makespan_s(rows(replace(layout, microbatches=microbatches), connected), connected, times, remainder)

    m, p = layout.microbatches, layout.pipeline
    period = 2 * p
    few = PERIODIC * p + m % period
    if in_full or remainder_pricer is not None or m <= few + period:
        pipeline_s = seconds(m)
    else:
        longer_s = seconds(few + period)
        periodic_s = longer_s + (m - few - period) // period * (longer_s - seconds(few))
        pipeline_s = max(periodic_s, least_pipeline_s(layout, [(c.forward_s, c.forward_s + c.backward_s) for c in priced.costs]))
    return replace(priced, prediction=pricer.predict(layout, priced.costs, (), pipeline_s, priced.smaller))


def _times(costs: Sequence[StageCost], sent: dict[tuple[int, int], float]) -> Times:
    return Times([c.forward_s for c in costs], [c.backward_s for c in costs], sent, [c.weight_s for c in costs])


def rows(layout: Layout, connected: Links) -> list[list[Compute]]:
    """Return the computes of every pipeline rank, in order."""
    return schedules.rows_of(layout, connected)


def least_pipeline_s(layout: Layout, trips_s: Sequence[tuple[float, float]], lends: float = 0.0) -> float:
    """Return a lower bound of the simulated time, for stages whose (forward, forward and backward) of a microbatch take so long.

    `lending_factor`: least fraction of all work over all ranks that is left where waiting ranks may lend their cores; 0 where they may not.

    A rank waits for the first microbatch to reach it, has all its own work, and what it sends back last still passes through the
    earlier stages, except gradients of weights. The same holds for every stage as if it were alone on its rank.
    """
    if lends:
        return lends * layout.microbatches * sum(trip_s for _, trip_s in trips_s) / layout.pipeline
    forward, trip_s = ([0.0, *accumulate(each)] for each in zip(*trips_s, strict=True))
    schedule = schedules.schedule_of(layout)
    bound_s = 0.0
    for shares, (first, last) in zip(schedule.shares, schedule.ends, strict=True):
        by_stage = {s: layout.microbatches * share * trips_s[s][1] for s, share in shares.items()}
        backward_s = 0.0 if last is None else trip_s[last] - forward[last]
        bound_s = max(bound_s, forward[first] + sum(by_stage.values()) + backward_s)
        for s, seconds in by_stage.items() if len(by_stage) > 1 else ():
            backward_s = 0.0 if schedule.splits_backward else trip_s[s] - forward[s]
            bound_s = max(bound_s, forward[s] + seconds + backward_s)
    return bound_s


def waits_to_fill(layout: Layout) -> bool:
    """Return whether ranks idle while the pipeline fills."""
    return schedules.schedule_of(layout).waits_to_fill


def trips_s(pricer: Pricer, layout: Layout, again: bool) -> list[tuple[float, float]]:
    """Return a lower bound of (forward, forward and backward) seconds of a microbatch for every balanced stage: its operators and the waits
    at its boundaries, with what full recomputation adds or without."""
    ends = [0, len(pricer.graph.operators)]
    if layout.num_stages > 1:
        numbers = {cut.site: cut.index for cut in places(pricer, layout)}
        ends[1:1] = [numbers[site] for site in balanced(pricer, layout)]
    cache: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    trips = []
    for k in range(layout.num_stages):
        own_pricer, inner = owner(pricer, layout, k), layout.of_stage(k)
        key = id(own_pricer), inner.data, inner.tensor
        if key not in cache:
            times = own_pricer.operator_seconds(inner)
            forward = times[0] + times[2]
            both_ways = forward + times[1] + times[3]
            if again:
                both_ways = both_ways + forward * own_pricer.parts(inner).again
            sums = np.concatenate([np.zeros((2, 1)), np.cumsum(np.stack([forward, both_ways]), axis=1)], axis=1)
            cache[key] = list(zip(*np.diff(sums[:, ends], axis=1).tolist(), strict=True))
        trips.append(cache[key][k])
    exposed = waited_part(pricer, layout)
    if exposed and layout.num_stages > 1:
        for stage in pricer.split(balanced(pricer, layout)):
            sent_s = sum(handed_s(pricer, layout, stage.index, to, values) for to, values in stage.sends)
            returned_s = sum(handed_s(pricer, layout, source, stage.index, values) for source, values in stage.receives)
            forward_s, trip_s = trips[stage.index]
            trips[stage.index] = forward_s + exposed * sent_s, trip_s + exposed * (sent_s + returned_s)
    return trips


def step_timeline(pricer: Pricer, priced: Priced) -> Timeline:
    """Return the whole predicted step: its program, and after that on every rank the exposed gradient reductions, the optimizer and the
    rest. It ends when the prediction does."""
    program, prediction = timeline(pricer, priced), priced.prediction
    parts = dict(prediction.parts)
    summed_s = program.end_s + parts["gradients"]
    updated_s = summed_s + parts["optimizer"]
    step_spans = []
    for rank, costs in enumerate(pricer.by_rank(priced.layout, priced.costs)):
        spans_of = (
            ("gradients", program.end_s, program.end_s + sum(c.gradients_s for c in costs)),
            ("optimizer", summed_s, summed_s + sum(c.optimizer_s for c in costs)),
            ("overhead", updated_s, max(updated_s, program.start_s + prediction.step_time_s)),
        )
        step_spans += [Span(rank, STEP_LANE, name, start, end, name) for name, start, end in spans_of if end > start]
    return Timeline(program.name, program.num_ranks, (*program.spans, *step_spans))


def timeline(pricer: Pricer, priced: Priced) -> Timeline:
    """Simulate forward and backward of one step on the program that would run; of one pipeline, since all replicas are equal."""
    layout = priced.layout
    connected = links(pricer.split(priced.sites))
    program = schedules.program_of(layout, connected)
    num_remainder, smaller = pricer.smaller(layout)
    sent, sent_smaller = sends_s(pricer, priced), {} if smaller is None else sends_s(smaller, priced)
    num_full = layout.microbatches - num_remainder
    lent: Lent | None = None
    lent_to: dict[int, tuple[StageCost, ...]] = {}
    lent_smaller = lent_to
    if layout.lend == "on" and may_lend(pricer.cluster, layout):
        sizes = dict(zip(program.microbatches, sizes_of_plan(pricer.batch_size, layout), strict=True))
        lent = Lent(pricer, layout, priced.sites, program, sizes)
        lent_to = lent.costs(pricer)
        lent_smaller = lent_to if smaller is None else lent.costs(smaller)

    def compute_s(action: Compute) -> float:
        is_full = action.microbatch < num_full
        if lent is not None and (seconds := lent_seconds(lent, lent_to if is_full else lent_smaller, action)) is not None:
            return seconds
        return compute_seconds((priced.costs if is_full else priced.smaller)[action.stage], action.op)

    def transfer_s(value: Value, sender: int, receiver: int) -> float:
        if len(value.index) < 2:  # a stage's gradients, to its other replica: priced with gradient reductions, after the last backward
            return 0.0
        by_link = sent if value.index[2] < num_full else sent_smaller
        return by_link.get((min(value.index[0], value.index[1]), max(value.index[0], value.index[1])), 0.0)

    def manage_s(action: Manage) -> float:
        """Seconds of copies to the host and back; gathering weights and reducing gradients is part of the stages' seconds."""
        if action.op not in (ManageOp.OFFLOAD, ManageOp.LOAD) or action.microbatch is None:
            return 0.0
        part_pricer = pricer if action.microbatch < num_full or smaller is None else smaller
        own_pricer = owner(part_pricer, layout, action.stage)
        state = own_pricer.state(layout.of_stage(action.stage), priced.sites, action.stage)
        return state.moved_bytes * own_pricer.devices.copies(layout).seconds_per_byte

    return simulate(program, compute_s, transfer_s, manage_s=manage_s, copies_beside=pricer.devices.copies(layout).beside)


def _unit_memory(pricer: Pricer, layout: Layout, tried: Sequence[Cut]) -> list[NDArray[np.float64]]:
    """Bytes of a stage of units i to j - 1, at [stage][i, j] for that pipeline position; sums over units, the largest buffers.

    Memory is linear in the microbatches in flight, so it is interpolated between the first and the last position.
    """
    units = tuple(cut.site for cut in tried)
    p = layout.pipeline
    in_flight = [schedules.schedule_of(layout).in_flight(k) for k in range(p)]
    cache: dict[tuple[int, int], NDArray[np.float64]] = {}

    def bytes_at(one: Pricer, k: int) -> NDArray[np.float64]:
        if (id(one), k) not in cache:
            memory = [cost.memory.alone for cost in one.stages(layout.of_stage(k), units, place=k)]
            unit_bytes = [m.parameters + m.gradients + m.optimizer + m.activations for m in memory]
            size = one.cluster.device.scratch_bytes + (1 + MARGIN) * runs_bytes(unit_bytes, [m.buffers for m in memory])
            cache[id(one), k] = size
        return cache[id(one), k]

    rows = []
    for k, f in enumerate(in_flight):
        one = owner(pricer, layout, k)
        if layout.inner:
            rows.append(bytes_at(one, k))
            continue
        fraction = (in_flight[0] - f) / (in_flight[0] - in_flight[-1]) if in_flight[0] != in_flight[-1] else 0.0
        rows.append(bytes_at(one, 0) + (bytes_at(one, p - 1) - bytes_at(one, 0)) * fraction)
    return rows
