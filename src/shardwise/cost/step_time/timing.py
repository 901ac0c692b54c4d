"""Price of one layout: its balanced stages, its prediction in closed form, and its step time simulated on its own program.

Where the most balanced stages do not fit their devices, the best that do are found, each with the microbatches that its position in the
schedule keeps in flight. Not modelled: what `shardwise.cost` and `shardwise.simulate` do not model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardwise import schedules
from shardwise.cost.memory.memory import MARGIN
from shardwise.cost.network.network import send_s
from shardwise.cost.stages.base import stage_send_s
from shardwise.cost.step import Pricer, StageCost
from shardwise.cost.step_time.balance import balance_stages, minimize_slowest_stage, select_cuts, stage_memory_matrix, stage_time_matrix_s
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer, stage_device_memory, stage_pricer
from shardwise.cost.step_time.lending import MIN_GAIN, CoreLending, compute_seconds, lent_compute_s, may_lend
from shardwise.cost.step_time.send_bounds import exposed_send_fraction
from shardwise.errors import Infeasible
from shardwise.model.stages.stages import Stage, StageCut, stage_links
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.program import Compute, Links, Manage, ManageOp, Value
from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import layout_microbatch_sizes
from shardwise.plan.plan import Prediction
from shardwise.simulate.clock import simulate
from shardwise.simulate.makespan import StageTimes, makespan_s

UnitSeconds = NDArray[np.float64]
MAX_LENDING_COMPUTES = 4_000  # computes of a step, at most, for which lending is simulated
FLOPS_PER_BYTE = 20.0  # that take as long as a byte of memory traffic: about 5 on CPUs, 100 on GPUs; only for stage boundaries
PERIODIC_AFTER = 4  # times the ranks: microbatches after which a schedule is periodic


@dataclass(frozen=True, slots=True)
class PricedLayout:
    """A layout with its price and the sites of its stages. `remainder_costs`: as `costs`, of the smaller of unequal microbatches."""

    layout: Layout
    prediction: Prediction
    sites: tuple[str, ...]
    costs: tuple[StageCost, ...]
    remainder_costs: tuple[StageCost, ...] = ()


def price(pricer: Pricer, layout: Layout, sites: Sequence[str] = ()) -> PricedLayout:
    """Price the layout in closed form, its stages balanced where `sites` does not give them.

    Raises:
        Infeasible: more stages than the model has places for. LayoutError: sites or shards that the model does not have.
        ProgramError: a custom schedule that is refuted.
    """
    if layout.num_stages > 1 and len(sites) != layout.num_stages - 1:
        sites = balanced_sites(pricer, layout)
    sites = tuple(sites) if layout.num_stages > 1 else ()
    schedules.check_custom(layout, stage_links(pricer.stages_at(sites)))
    costs = _stage_costs(pricer, layout, sites)
    boundaries = [sum(_send_s(pricer, layout, stage, to, values) for to, values in stage.sends) for stage in pricer.stages_at(sites)[:-1]]
    _, remainder_pricer = pricer.remainder_pricer(layout)
    smaller: tuple[StageCost, ...] = ()
    if remainder_pricer is not None:
        smaller = _stage_costs(remainder_pricer.with_buckets_of(pricer, layout, sites), layout, sites)
    return PricedLayout(layout, pricer.predict(layout, costs, boundaries, remainder_costs=smaller), sites, costs, smaller)


def _stage_costs(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> tuple[StageCost, ...]:
    if not layout.inner:
        return pricer.stages(layout, sites)
    pricer = pricer.with_default_buckets
    return tuple(pricer.stages(layout.of_stage(s), sites, only=(s,))[0] for s in range(layout.num_stages))


def balanced_sites(pricer: Pricer, layout: Layout) -> tuple[str, ...]:
    """Return the sites where the most balanced stages begin, () of a single stage; the same whatever the ZeRO stage, recomputation and
    schedule, but for what a divided backward changes."""
    if layout.num_stages == 1:
        return ()
    key = (
        layout.axes, layout.num_stages, layout.microbatches, layout.precision, layout.threads, layout.sequence_parallel,
        layout.sample_parallel, layout.attention, layout.batch_norm, layout.shares, layout.inner,
        layout.loss_chunks, pricer.gathers_again(layout),
    )  # fmt: skip
    if key not in pricer.balanced_sites:
        tried = cut_candidates(pricer, layout)
        are_unequal = layout.inner or (isinstance(pricer, HeterogeneousPricer) and pricer.has_aligned_stages(layout))
        if are_unequal or len(set(_boundary_distances(pricer, layout))) > 1:
            starts, _ = minimize_slowest_stage(_stage_times_s(pricer, layout, tried))
        else:
            units = unit_seconds(pricer, layout, tried).sum(axis=0)
            starts, _ = balance_stages(units.tolist(), boundary_times_s(pricer, layout, tried), layout.num_stages)
        pricer.balanced_sites[key] = tuple(tried[i - 1].site for i in starts)
    return pricer.balanced_sites[key]


def fit_stages(pricer: Pricer, layout: Layout) -> PricedLayout:
    """Price the layout with the most balanced of those stages that each fit their device, by the memory of their layers.

    Raises:
        Infeasible: there are none.
    """
    tried = cut_candidates(pricer, layout)
    memory = _unit_memory(pricer, layout, tried)
    seconds = [
        np.where(size <= stage_device_memory(pricer, layout, k), stage_s, np.inf)
        for k, (stage_s, size) in enumerate(zip(_stage_times_s(pricer, layout, tried), memory, strict=True))
    ]
    starts, _ = minimize_slowest_stage(seconds)
    return price(pricer, layout, tuple(tried[i - 1].site for i in starts))


def _stage_times_s(pricer: Pricer, layout: Layout, cuts: Sequence[StageCut]) -> list[NDArray[np.float64]]:
    """Seconds of a stage of units i to j - 1, at [stage][i, j], on the devices of that stage, with its own boundaries."""
    if layout.inner:
        return _unequal_stage_times_s(pricer, layout, cuts)
    cache: dict[tuple[int, int, int], NDArray[np.float64]] = {}
    crossing: dict[tuple[int, int], list[float]] = {}
    distances = _boundary_distances(pricer, layout)
    rows = []
    for k in range(layout.num_stages):
        part, ends = stage_pricer(pricer, layout, k), (distances[max(0, k - 1)], distances[min(k, len(distances) - 1)])
        if (id(part), *ends) not in cache:
            for distance in ends:
                if (id(part), distance) not in crossing:
                    at = distances.index(distance)
                    crossing[id(part), distance] = boundary_times_s(part, layout, cuts, at % layout.pipeline, (at + 1) % layout.pipeline)
            units = unit_seconds(part, layout, cuts).sum(axis=0).tolist()
            cache[(id(part), *ends)] = stage_time_matrix_s(units, *(crossing[id(part), distance] for distance in ends))
        rows.append(cache[(id(part), *ends)])
    return rows


def _unequal_stage_times_s(pricer: Pricer, layout: Layout, cuts: Sequence[StageCut]) -> list[NDArray[np.float64]]:
    """Seconds as of `_stage_times_s`, of stages that each arrange their ranks differently, on devices of their own."""
    last, rows = layout.num_stages - 1, []
    sizes = [pricer.boundary_bytes(layout, cut.values) for cut in cuts]
    boundary_s = []
    for k in range(last):
        seconds = {size: 2 * _boundary_send_s(pricer, layout, k, k + 1, size) for size in set(sizes)}
        boundary_s.append([seconds[size] for size in sizes])
    for k in range(layout.num_stages):
        inner = layout.of_stage(k)
        pricer.sharding(inner)  # cached once, and shared by the pricers of all parts
        units = unit_seconds(stage_pricer(pricer, layout, k), inner, cuts).sum(axis=0).tolist()
        rows.append(stage_time_matrix_s(units, boundary_s[max(0, k - 1)], boundary_s[min(k, last - 1)]))
    return rows


def _boundary_distances(pricer: Pricer, layout: Layout) -> list[int]:
    """Rank distance of each stage to the next, with chunks one after the other, whatever the schedule."""
    p = layout.pipeline
    return [pricer.rank_distance(layout, s % p, (s + 1) % p) for s in range(layout.num_stages - 1)]


def cut_candidates(pricer: Pricer, layout: Layout) -> list[StageCut]:
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
    if cuts is not (pricer.cuts if layout.loss_chunks == 1 else pricer.chunked_cuts):
        return select_cuts(cuts, least, _operator_work(pricer))
    key = least, layout.loss_chunks > 1
    if key not in pricer.cut_candidates:
        pricer.cut_candidates[key] = select_cuts(cuts, least, _operator_work(pricer))
    return pricer.cut_candidates[key]


def _operator_work(pricer: Pricer) -> list[float]:
    """Work of every operator, forward and backward: its FLOPs, and its memory traffic at a rate between those of devices."""
    works = (pricer.inventory.works[op.name] for op in pricer.graph.operators)
    return [w.flops + w.backward_flops + FLOPS_PER_BYTE * (w.bytes + w.backward_bytes) for w in works]


def unit_seconds(pricer: Pricer, layout: Layout, cuts: Sequence[StageCut]) -> UnitSeconds:
    """Seconds of one microbatch, rows forward and backward, of the operators between `cuts`: shape [2, cuts + 1]."""
    forward, backward, out, back = pricer.operator_seconds(layout)
    rows = np.stack([forward + out, backward + back])
    sums = np.concatenate([np.zeros((2, 1)), np.cumsum(rows, axis=1)], axis=1)
    ends = np.array([0, *(cut.index for cut in cuts), rows.shape[1]])
    return cast(UnitSeconds, np.diff(sums[:, ends], axis=1))


def boundary_times_s(pricer: Pricer, layout: Layout, cuts: Sequence[StageCut], source: int = 0, target: int = 1) -> list[float]:
    """Seconds that the boundary between two pipeline positions costs at each cut for one microbatch, both ways."""
    tensors, batched = pricer.graph.tensors, pricer.inventory.batched
    cache: dict[tuple[tuple[int, bool], ...], float] = {}
    seconds = []
    for cut in cuts:
        key = tuple([(tensors[v].size_bytes, v in batched) for v in cut.values])
        if key not in cache:
            cache[key] = 2 * pricer.transfer_s(layout, pricer.boundary_bytes(layout, cut.values), source, target)
        seconds.append(cache[key])
    return seconds


def _send_s(pricer: Pricer, layout: Layout, stage: Stage, target: int, values: Sequence[str]) -> float:
    """Seconds to send `values` of one microbatch from a stage to another; nothing within a rank."""
    ranks_of = schedules.schedule_of(layout).ranks_of
    if ranks_of[stage.index][0] == ranks_of[target][0]:
        return 0.0
    if layout.inner or isinstance(pricer, HeterogeneousPricer):
        return _boundary_send_s(pricer, layout, stage.index, target, pricer.boundary_bytes(layout, values))
    return stage_send_s(pricer, layout, stage.index, target, values)


def _boundary_send_s(pricer: Pricer, layout: Layout, source: int, target: int, size_bytes: float) -> float:
    """Seconds to send one microbatch's `size_bytes` from a stage to another, on a heterogeneous cluster or to one with another arrangement.
    Then every rank sends an equal part, each element once, and tensor ranks that need it whole gather it; so do all where stages have
    unequal numbers of ranks."""
    from_layout, to_layout = layout.of_stage(source), layout.of_stage(target)
    reshards = from_layout != to_layout or bool(layout.begins)
    if isinstance(pricer, HeterogeneousPricer):
        sent = pricer.boundary_send_s(from_layout, source, target, size_bytes)
    elif reshards and not layout.begins:
        sent = send_s(pricer.cluster, size_bytes / layout.stage_ranks, layout.stage_ranks, layout.stage_ranks)
    else:
        sent = pricer.transfer_s(from_layout, size_bytes, source, target)
    if not reshards or to_layout.tensor == 1:
        return sent
    receiver = stage_pricer(pricer, layout, target)
    return sent + receiver.collective("all_gather", size_bytes / to_layout.data, receiver.group(to_layout, "tensor"))


def link_times_s(pricer: Pricer, priced: PricedLayout) -> dict[tuple[int, int], float]:
    """Seconds of one microbatch on every link (producer stage, consumer stage)."""
    stages = pricer.stages_at(priced.sites)
    return {(s.index, to): _send_s(pricer, priced.layout, s, to, values) for s in stages for to, values in s.sends}


def simulate_time(pricer: Pricer, priced: PricedLayout, *, is_full: bool = True) -> PricedLayout:
    """Return the layout with its pipeline simulated on the program that would run, and with cores lent where that pays.

    `is_full=False`: of a step of many microbatches only a part is simulated. Schedules are periodic in p or 2p of them, so the steady-state
    time of 2p more is extrapolated. That is exact for equal stages. Where a rank a little slower than the others has not yet used up
    the head start that its schedule gives it, that is too little, and the slowest rank's own work is the better bound; the remaining
    error is up to 1 % too little, never too much.
    """
    timed = _simulate_pipeline(pricer, priced, is_full)
    if not may_lend(pricer.cluster, priced.layout) or (priced.layout.lend == AUTO and _num_computes(priced.layout) > MAX_LENDING_COMPUTES):
        return timed
    lending = replace(priced, layout=replace(priced.layout, lend="on"))
    total = simulate_timeline(pricer, lending).total_s
    lending = replace(lending, prediction=pricer.predict(lending.layout, lending.costs, (), total, lending.remainder_costs))
    pays = lending.prediction.step_time_s < (1 - MIN_GAIN) * timed.prediction.step_time_s
    return lending if pays or priced.layout.lend == "on" else timed


def _num_computes(layout: Layout) -> int:
    """Number of computes of a step, each way as one."""
    return 2 * layout.num_stages * layout.microbatches


def _simulate_pipeline(pricer: Pricer, priced: PricedLayout, is_full: bool) -> PricedLayout:
    layout = priced.layout
    if layout.actions and schedules.schedule_of(layout).manages_memory:
        return replace(
            priced, prediction=pricer.predict(layout, priced.costs, (), simulate_timeline(pricer, priced).total_s, priced.remainder_costs)
        )
    if layout.pipeline == 1:
        return priced
    is_full = is_full or bool(layout.actions)  # custom schedules are for one number of microbatches
    connected = stage_links(pricer.stages_at(priced.sites))
    times = _as_stage_times(priced.costs, link_times_s(pricer, priced))
    num_remainder, remainder_pricer = pricer.remainder_pricer(layout)
    remainder: tuple[int, StageTimes] | None = None
    if remainder_pricer is not None:
        remainder = layout.microbatches - num_remainder, _as_stage_times(priced.remainder_costs, link_times_s(remainder_pricer, priced))

    def seconds(microbatches: int) -> float:
        return makespan_s(computes_by_rank(replace(layout, microbatches=microbatches), connected), connected, times, remainder)

    m, p = layout.microbatches, layout.pipeline
    period = 2 * p
    few = PERIODIC_AFTER * p + m % period
    if is_full or remainder_pricer is not None or m <= few + period:
        pipeline_s = seconds(m)
    else:
        longer_s = seconds(few + period)
        periodic_s = longer_s + (m - few - period) // period * (longer_s - seconds(few))
        pipeline_s = max(periodic_s, pipeline_lower_bound_s(layout, [(c.forward_s, c.forward_s + c.backward_s) for c in priced.costs]))
    return replace(priced, prediction=pricer.predict(layout, priced.costs, (), pipeline_s, priced.remainder_costs))


def _as_stage_times(costs: Sequence[StageCost], sent: dict[tuple[int, int], float]) -> StageTimes:
    return StageTimes([c.forward_s for c in costs], [c.backward_s for c in costs], sent, [c.weight_s for c in costs])


def computes_by_rank(layout: Layout, links: Links) -> list[list[Compute]]:
    """Return the computes of every pipeline rank, in order."""
    return schedules.layout_computes_by_rank(layout, links)


def pipeline_lower_bound_s(layout: Layout, trips_s: Sequence[tuple[float, float]], lending_factor: float = 0.0) -> float:
    """Return a lower bound of the simulated time, for stages whose (forward, forward and backward) of a microbatch take so long.

    `lending_factor`: least fraction of all work over all ranks that is left where waiting ranks may lend their cores; 0 where they may not.

    A rank waits for the first microbatch to reach it, has all its own work, and what it sends back last still passes through the
    earlier stages, except gradients of weights. The same holds for every stage as if it were alone on its rank.
    """
    if lending_factor:
        return lending_factor * layout.microbatches * sum(trip_s for _, trip_s in trips_s) / layout.pipeline
    forward, trip_s = ([0.0, *accumulate(each)] for each in zip(*trips_s, strict=True))
    schedule = schedules.schedule_of(layout)
    bound_s = 0.0
    for shares, (first, last) in zip(schedule.shares, schedule.first_and_last_stages, strict=True):
        by_stage = {s: layout.microbatches * share * trips_s[s][1] for s, share in shares.items()}
        backward_s = 0.0 if last is None else trip_s[last] - forward[last]
        bound_s = max(bound_s, forward[first] + sum(by_stage.values()) + backward_s)
        for s, seconds in by_stage.items() if len(by_stage) > 1 else ():
            backward_s = 0.0 if schedule.splits_backward else trip_s[s] - forward[s]
            bound_s = max(bound_s, forward[s] + seconds + backward_s)
    return bound_s


def has_fill_drain_bubble(layout: Layout) -> bool:
    """Return whether ranks idle while the pipeline fills."""
    return schedules.schedule_of(layout).has_fill_drain_bubble


def stage_trips_lower_bound_s(pricer: Pricer, layout: Layout, with_recompute: bool) -> list[tuple[float, float]]:
    """Return a lower bound of (forward, forward and backward) seconds of a microbatch for every balanced stage: its operators and the waits
    at its boundaries, with what full recomputation adds or without."""
    ends = [0, len(pricer.graph.operators)]
    if layout.num_stages > 1:
        numbers = {cut.site: cut.index for cut in cut_candidates(pricer, layout)}
        ends[1:1] = [numbers[site] for site in balanced_sites(pricer, layout)]
    cache: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    trips = []
    for k in range(layout.num_stages):
        own_pricer, inner = stage_pricer(pricer, layout, k), layout.of_stage(k)
        key = id(own_pricer), inner.data, inner.tensor
        if key not in cache:
            times = own_pricer.operator_seconds(inner)
            forward = times[0] + times[2]
            both_ways = forward + times[1] + times[3]
            if with_recompute:
                both_ways = both_ways + forward * own_pricer.sharded_inventory(inner).recomputed
            sums = np.concatenate([np.zeros((2, 1)), np.cumsum(np.stack([forward, both_ways]), axis=1)], axis=1)
            cache[key] = list(zip(*np.diff(sums[:, ends], axis=1).tolist(), strict=True))
        trips.append(cache[key][k])
    exposed = exposed_send_fraction(pricer, layout)
    if exposed and layout.num_stages > 1:
        for stage in pricer.stages_at(balanced_sites(pricer, layout)):
            sent_s = sum(stage_send_s(pricer, layout, stage.index, to, values) for to, values in stage.sends)
            returned_s = sum(stage_send_s(pricer, layout, source, stage.index, values) for source, values in stage.receives)
            forward_s, trip_s = trips[stage.index]
            trips[stage.index] = forward_s + exposed * sent_s, trip_s + exposed * (sent_s + returned_s)
    return trips


def simulate_timeline(pricer: Pricer, priced: PricedLayout) -> Timeline:
    """Simulate forward and backward of one step on the program that would run; of one pipeline, since all replicas are equal."""
    layout = priced.layout
    connected = stage_links(pricer.stages_at(priced.sites))
    program = schedules.program_of(layout, connected)
    num_remainder, smaller = pricer.remainder_pricer(layout)
    sent, sent_smaller = link_times_s(pricer, priced), {} if smaller is None else link_times_s(smaller, priced)
    num_full = layout.microbatches - num_remainder
    lent: CoreLending | None = None
    lent_to: dict[int, tuple[StageCost, ...]] = {}
    lent_smaller = lent_to
    if layout.lend == "on" and may_lend(pricer.cluster, layout):
        sizes = dict(zip(program.microbatches, layout_microbatch_sizes(pricer.batch_size, layout), strict=True))
        lent = CoreLending(pricer, layout, priced.sites, program, sizes)
        lent_to = lent.stage_costs(pricer)
        lent_smaller = lent_to if smaller is None else lent.stage_costs(smaller)

    def compute_s(action: Compute) -> float:
        is_full = action.microbatch < num_full
        if lent is not None and (seconds := lent_compute_s(lent, lent_to if is_full else lent_smaller, action)) is not None:
            return seconds
        return compute_seconds((priced.costs if is_full else priced.remainder_costs)[action.stage], action.op)

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
        own_pricer = stage_pricer(part_pricer, layout, action.stage)
        state = own_pricer.stage_state(layout.of_stage(action.stage), priced.sites, action.stage)
        return state.offloaded_bytes * own_pricer.devices.copies(layout).seconds_per_byte

    return simulate(program, compute_s, transfer_s, manage_s=manage_s, copies_overlap=pricer.devices.copies(layout).overlap_compute)


def _unit_memory(pricer: Pricer, layout: Layout, cuts: Sequence[StageCut]) -> list[NDArray[np.float64]]:
    """Bytes of a stage of units i to j - 1, at [stage][i, j] for that pipeline position; sums over units, the largest buffers.

    Memory is linear in the microbatches in flight, so it is interpolated between the first and the last position.
    """
    units = tuple(cut.site for cut in cuts)
    p = layout.pipeline
    in_flight = [schedules.schedule_of(layout).in_flight(k) for k in range(p)]
    cache: dict[tuple[int, int], NDArray[np.float64]] = {}

    def bytes_at(one: Pricer, k: int) -> NDArray[np.float64]:
        if (id(one), k) not in cache:
            memory = [cost.memory.alone for cost in one.stages(layout.of_stage(k), units, place=k)]
            unit_bytes = [m.parameters + m.gradients + m.optimizer + m.activations for m in memory]
            size = (
                one.cluster.device.scratch_bytes
                + one.fused_workspace_bytes(layout)
                + (1 + MARGIN) * stage_memory_matrix(unit_bytes, [m.buffers for m in memory])
            )
            cache[id(one), k] = size
        return cache[id(one), k]

    rows = []
    for k, f in enumerate(in_flight):
        one = stage_pricer(pricer, layout, k)
        if layout.inner:
            rows.append(bytes_at(one, k))
            continue
        fraction = (in_flight[0] - f) / (in_flight[0] - in_flight[-1]) if in_flight[0] != in_flight[-1] else 0.0
        rows.append(bytes_at(one, 0) + (bytes_at(one, p - 1) - bytes_at(one, 0)) * fraction)
    return rows
