"""Activation memory of a layout that does not fit: find the cheapest set of layers to offload or recompute so that it fits, by the prices.

Offloading is free while copies overlap the stage's compute (`HostCopies`); recomputing costs a forward. Stages on different ranks do
not share memory, so the fastest choice of each rank is the fastest of all. No choice takes less than `added_time_lower_bound_s`. Not
modelled: stages that are on several ranks.

Where layers are recomputed several at a time (segments), the fewest are found by bisection over whole segments, since a stage's memory
falls with each that is recomputed but the first; the result is checked against the prices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.devices import HOST_SLOWS
from shardwise.cost.memory.memory import MARGIN, StageMemory, bytes_by_moment
from shardwise.cost.stages.base import LayerCost
from shardwise.cost.stages.stage import StageCost, combine_stage_memory
from shardwise.cost.step import Pricer
from shardwise.cost.step_time.heterogeneous import stage_device_memory, stage_pricer
from shardwise.cost.step_time.timing import PricedLayout, balanced_sites, price
from shardwise.errors import Infeasible, LayoutError
from shardwise.plan.ir.ranges import escape_name, shorten_names, write_counts
from shardwise.plan.layout import Layout
from shardwise.plan.residency import CHEAP, LayerChoice
from shardwise.schedules import NO_GRADIENTS, Schedule, schedule_of
from shardwise.solve.activation_memory.residency import (
    ALL_CHOICES,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    ChoicePerLayer,
    MemoryBudget,
    StageLayers,
    choose_layers,
    encode_choices,
)
from shardwise.solve.activation_memory.shared_rank_memory import SharedRankMemory, StageOptions, layer_count_options
from shardwise.units import format_bytes, format_seconds

_MAX_RETRIES = 16  # retries with a smaller limit of a choice that does not fit by the prices


def choose_activation_memory(pricer: Pricer, layout: Layout, sites: Sequence[str], allowed: Sequence[str] = ALL_CHOICES) -> Layout | None:
    """Return `layout`, which neither recomputes nor offloads layers, with the layers to recompute and offload so that every rank fits.

    None where it fits without, where all layers would be recomputed or nothing fits, and where stages are on several ranks.
    """
    schedule = schedule_of(layout)
    if schedule.has_replicas:
        return None
    by_stage: dict[int, ChoicePerLayer] = {}
    for rank, stages_here in enumerate(schedule.stages_of):
        if len(stages_here) > 1:
            choices = _choose_for_rank(pricer, layout, sites, rank, allowed)
        else:
            stage_choice = _choose_for_stage(pricer, layout, sites, stages_here[0], allowed)
            choices = None if stage_choice is None else [stage_choice]
        if choices is None:
            return None
        by_stage |= dict(zip(stages_here, choices, strict=True))
    kinds = {choice for choices in by_stage.values() for choice in choices}
    if kinds in ({KEEP}, {RECOMPUTE}):
        return None
    stages = range(layout.num_stages)
    names = [[layer.name for layer in stage_pricer(pricer, layout, s).layer_costs(layout.of_stage(s), sites, s)] for s in stages]
    return with_layer_choices(layout, [(stages_here, by_stage[stage]) for stage, stages_here in enumerate(names)])


def with_layer_choices(layout: Layout, stages: Sequence[tuple[Sequence[str], ChoicePerLayer]]) -> Layout:
    """Return `layout` with the choices of every stage's layers as its keys: counts where the first are offloaded and the next recomputed,
    names elsewhere.

    >>> str(with_layer_choices(Layout(), [(["h.0", "h.1", "h.2"], (OFFLOAD, RECOMPUTE, KEEP))]))
    'data=1 tensor=1 pipeline=1 recompute=full:1 offload=activations:1'
    >>> str(with_layer_choices(Layout(), [(["h.0", "h.1", "h.2"], (KEEP, RECOMPUTE, OFFLOAD))]))
    'data=1 tensor=1 pipeline=1 recompute=full:h.1 offload=activations:h.2'
    """
    offloaded = [[name for name, choice in zip(names, choices, strict=True) if choice == OFFLOAD] for names, choices in stages]
    remaining = [[(name, choice) for name, choice in zip(names, choices, strict=True) if choice != OFFLOAD] for names, choices in stages]
    recomputed = [[name for name, choice in rest if choice == RECOMPUTE] for rest in remaining]
    first_offloaded = all(list(names[: len(picked)]) == picked for (names, _), picked in zip(stages, offloaded, strict=True))
    next_recomputed = all([name for name, _ in rest[: len(picked)]] == picked for rest, picked in zip(remaining, recomputed, strict=True))
    if not any(offloaded):
        offload = layout.offload
    else:
        offload = str(_layer_choice("offload", "all" if layout.offloads_optimizer else "activations", offloaded, first_offloaded))
    recompute = str(_layer_choice("recompute", "full", recomputed, first_offloaded and next_recomputed)) if any(recomputed) else "none"
    return replace(layout, offload=offload, recompute=recompute)


def _layer_choice(key: str, kind: str, layers: Sequence[Sequence[str]], is_counted: bool) -> LayerChoice:
    if not is_counted:
        return LayerChoice(key, kind, (), tuple(escape_name(name) for names in layers for name in names))
    counts = tuple(len(names) for names in layers)
    return LayerChoice(key, kind, counts if len(set(counts)) > 1 else counts[:1])


def _choose_for_stage(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int, allowed: Sequence[str]) -> ChoicePerLayer | None:
    """Choose for one stage's layers, by the prices' own bytes; None where nothing fits."""
    pricer = pricer.with_default_buckets if layout.inner else pricer
    layout = layout.of_stage(stage)
    pricer_here, have = stage_pricer(pricer, layout, stage), stage_device_memory(pricer, layout, stage)
    layers = pricer_here.layer_costs(layout, sites, stage)

    def needs(choices: ChoicePerLayer) -> float:
        chosen = ([layer.name for layer in layers], choices)
        by_stage = [chosen if s == stage else ([], ()) for s in range(layout.num_stages)]
        return pricer.stage_memories(with_layer_choices(layout, by_stage), sites, (stage,))[0].alone.total

    all_kept = (KEEP,) * len(layers)
    kept_bytes = needs(all_kept)
    if kept_bytes <= have:
        return all_kept
    (cost,) = pricer.stages(layout, sites, only=(stage,))
    in_flight = schedule_of(layout).in_flight(stage)
    devices = pricer_here.devices
    room = MemoryBudget(
        inf, cost.compute, devices.copies(layout), in_flight, pricer_here.unlayered_cost(layout, sites, stage), devices.num_layers_loaded
    )
    arrays = StageLayers(layers)
    limit = float(arrays.peak_bytes(encode_choices([all_kept]), room)[0]) - (kept_bytes - have) / (1 + MARGIN)
    for _ in range(_MAX_RETRIES):
        try:
            choices = choose_layers(layers, replace(room, limit_bytes=limit), allowed)
        except Infeasible:
            return None
        need = needs(choices)
        if need <= have:
            return _keep_where_possible(arrays, room, choices, lambda tried: needs(tried) <= have)
        limit = min(limit - (need - have) / (1 + MARGIN), 0.999 * float(arrays.peak_bytes(encode_choices([choices]), room)[0]))
    return None


def _choose_for_rank(
    pricer: Pricer, layout: Layout, sites: Sequence[str], rank: int, allowed: Sequence[str]
) -> list[ChoicePerLayer] | None:
    """Choose for the layers of a rank's several stages, by the prices; None where nothing fits."""
    schedule = schedule_of(layout)
    stages = schedule.stages_of[rank]
    have = stage_device_memory(pricer, layout, stages[0])
    layers = [len(stage_pricer(pricer, layout, stage).layer_costs(layout, sites, stage)) for stage in stages]
    memories = pricer.stage_memories(layout, sites, stages)
    excess = combine_stage_memory(memories, schedule, rank).total - have
    if excess <= 0:
        return [(KEEP,) * count for count in layers]
    options = [layer_count_options(count, OFFLOAD in allowed, RECOMPUTE in allowed) for count in layers]
    costs: list[list[StageCost]] = [[] for _ in stages]
    for offloaded, recomputed in sorted({counts for counts_of_stage in options for counts in counts_of_stage}):
        indices = [i for i, counts in enumerate(options) if (offloaded, recomputed) in counts]
        candidate = with_layer_choices(
            layout, [([str(i) for i in range(offloaded + recomputed)], (OFFLOAD,) * offloaded + (RECOMPUTE,) * recomputed)]
        )
        for i, cost in zip(indices, pricer.stages(candidate, sites, only=[stages[i] for i in indices]), strict=True):
            costs[i].append(cost)
    live = schedule.live_microbatches(rank)
    entering, leaving = np.array([m.entering_bytes for m in memories]), np.array([m.leaving_bytes for m in memories])
    late = np.array([m.late_gradient_bytes for m in memories])
    transient = live.inputs_in_transfer @ entering + live.gradients_in_transfer @ leaving + (live.weight_gradients > NO_GRADIENTS) @ late
    shared = SharedRankMemory([StageOptions.from_costs(sorted(c), k) for c, k in zip(options, costs, strict=True)], live, transient)
    try:
        chosen = shared.choose(float(shared.bytes_by_moment([0] * len(stages)).max()) - excess / (1 + MARGIN))
    except Infeasible:
        return None
    return [(OFFLOAD,) * k + (RECOMPUTE,) * d + (KEEP,) * (count - k - d) for (k, d), count in zip(chosen, layers, strict=True)]


def added_time_lower_bound_s(pricer: Pricer, layout: Layout, sites: Sequence[str], rank: int, allowed: Sequence[str]) -> float:
    """Seconds of one microbatch, both ways, that offload and recompute add to a rank at the least; infinite where it cannot fit.

    `layout` neither recomputes nor offloads layers. At the tightest moment recomputing a layer frees at most its saved tensors, and so does
    offloading it; fractions of layers are allowed (a fractional knapsack), and copies of all stages overlap the compute of all. Transient
    memory only grows.
    """
    schedule = schedule_of(layout)
    stages = schedule.stages_of[rank]
    have = stage_device_memory(pricer, layout, stages[0])
    memories = pricer.stage_memories(layout, sites, stages)
    excess = (combine_stage_memory(memories, schedule, rank).total - have) / (1 + MARGIN)
    if excess <= 0:
        return 0.0
    pricer_here = stage_pricer(pricer, layout, stages[0])
    layer_costs = [pricer_here.layer_costs(layout, sites, stage) for stage in stages]
    counts, spare = _freeable_by_moment(schedule, rank, memories)
    free = counts @ np.array([sum(layer.saved_bytes for layer in layers) for layers in layer_costs])  # bytes that could be freed, by moment
    tightest = int(np.argmax(np.maximum(0.0, excess - spare) / np.maximum(free, 1.0)))
    excess -= float(spare[tightest])
    if excess > free[tightest] * (1 + 1e-9):
        return inf
    layers = [(count, layer) for count, layers in zip(counts[tightest].tolist(), layer_costs, strict=True) for layer in layers]
    saved, recompute_s = _recomputable_costs(layers)
    copies, most = pricer_here.devices.copies(layout), float(counts[tightest].max())  # microbatches for which an offloaded byte is freed
    compute = sum((cost.compute for cost in pricer.stages(layout, sites, only=stages)), Seconds())
    order = np.argsort(recompute_s / np.maximum(saved, 1.0), kind="stable") if RECOMPUTE in allowed else np.zeros(0, dtype=np.intp)
    freed, spent_s = (np.concatenate(([0.0], np.cumsum(column[order]))) for column in (saved, recompute_s))
    # Offload is convex in its bytes and recompute falls convexly, so the minimum is at a kink of one of them.
    kinks = [seconds / copies.seconds_per_byte / (1 - HOST_SLOWS) for seconds in (compute.forward, compute.backward)]
    offloaded = np.array([0.0, *kinks, *((excess - freed) / most)] if OFFLOAD in allowed else [0.0])
    is_enough = (offloaded * most <= excess * (1 + 1e-9)) & (excess - offloaded * most <= freed[-1] * (1 + 1e-9))
    offloaded = np.unique(offloaded[(offloaded >= 0) & is_enough])
    recompute_times = np.interp(excess - offloaded * most, freed, spent_s)
    pairs = zip(offloaded.tolist(), recompute_times.tolist(), strict=True)
    return min((copies.with_copies(compute, size).total - compute.total + added_s for size, added_s in pairs), default=inf)


def _recomputable_costs(layers: Sequence[tuple[float, LayerCost]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what recomputation may free, and its seconds: of each layer what its cheap operators make, and the rest with the others."""
    freed = [(count * layer.cheap_bytes, count * (layer.saved_bytes - layer.cheap_bytes)) for count, layer in layers]
    whole_s = [(layer.cheap_s, layer.forward_s + layer.collectives_s - layer.cheap_s) for _, layer in layers]
    return np.maximum(0.0, np.array(freed).reshape(-1)), np.maximum(0.0, np.array(whole_s).reshape(-1))


def _freeable_by_moment(schedule: Schedule, rank: int, memories: Sequence[StageMemory]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return [moment, stage of the rank], microbatches whose saved tensors offload or recompute would free (those that await their backward
    but have not recomputed for their weights part), and [moment], bytes below the rank's peak."""
    if len(memories) == 1 and not schedule.splits_backward:
        return np.array([[schedule.in_flight(schedule.stages_of[rank][0])]]), np.zeros(1)
    live = schedule.live_microbatches(rank)
    live_bytes = bytes_by_moment(memories, live).total
    spare = np.max(live_bytes) - live_bytes[: len(live.in_flight)]
    return (live.in_flight - live.awaiting_weight_gradient).astype(np.float64), spare


def _keep_where_possible(
    stage: StageLayers, room: MemoryBudget, choices: ChoicePerLayer, fits: Callable[[ChoicePerLayer], bool]
) -> ChoicePerLayer:
    """Keep every layer that there is memory for after all, the most expensive first."""
    layers = stage.layers
    refused: set[tuple[str, float, float]] = set()
    by_cost = sorted(range(len(layers)), key=lambda i: (-layers[i].forward_s, -i))
    for i in by_cost:
        kind = (choices[i], layers[i].forward_s, layers[i].saved_bytes)
        if choices[i] == KEEP or kind in refused:
            continue
        candidate = (*choices[:i], KEEP, *choices[i + 1 :])
        new, old = stage.seconds(encode_choices([candidate, choices]), room).tolist()
        if new < old and fits(candidate):
            choices = candidate
        else:
            refused.add(kind)
    return choices


def price_with_activation_memory(pricer: Pricer, layout: Layout, allowed: Sequence[str] = ALL_CHOICES) -> PricedLayout | None:
    """Apply `choose_activation_memory` with the layout's balanced stages and price it in closed form; None where it finds nothing."""
    try:
        sites = balanced_sites(pricer, layout)
        layout_found = choose_activation_memory(pricer, layout, sites, allowed)
        return None if layout_found is None else price(pricer, layout_found, sites)
    except (Infeasible, LayoutError):
        return None


def describe_layer_choices(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> str:
    """Describe which layers are offloaded and recomputed, with what it costs; empty where it is all layers or none, but for cheap ones."""
    residency = layout.residency
    is_cheap = residency.recompute.kind == CHEAP
    if (layout.offloads_layers and not residency.offload.is_partial) or not (
        residency.recompute.is_partial or residency.offload.is_partial or is_cheap
    ):
        return ""
    stages_by_words: dict[str, list[int]] = {}
    for stage in range(layout.num_stages):
        inner = layout.of_stage(stage)
        pricer_here = stage_pricer(pricer, inner, stage)
        layers, copies = pricer_here.layer_costs(inner, sites, stage), pricer_here.devices.copies(inner)
        names = [layer.name for layer in layers]
        offloaded, recomputed = residency.offloaded_layers(stage, names), residency.recomputed_layers(stage, names)
        size = pricer_here.stage_state(inner, sites, stage).offloaded_bytes if offloaded else 0.0
        ours = [layer for layer in layers if layer.name in recomputed]
        recompute_s = sum(layer.cheap_s if is_cheap else layer.forward_s + layer.collectives_s for layer in ours)
        of_each = f" in their cheap operators, which frees {format_bytes(sum(layer.cheap_bytes for layer in ours))}" if is_cheap else ""
        overlap = "overlapping compute" if copies.overlap_compute else "not overlapping compute"
        copy_words = f" ({format_bytes(size)} and {format_seconds(size * copies.seconds_per_byte)} each way of a microbatch, {overlap})"
        words = (
            f"of {len(layers)} layers {len(offloaded)} are offloaded to the host{copy_words if offloaded else ''}, "
            f"{len(recomputed)} are recomputed{of_each}{f' ({format_seconds(recompute_s)})' if recomputed else ''}, "
            f"{len(layers) - len(offloaded) - len(recomputed)} keep their activations"
        )
        stages_by_words.setdefault(words, []).append(stage)
    if len(stages_by_words) == 1:
        return f"{next(iter(stages_by_words))}{', in every stage' if layout.num_stages > 1 else ''}"
    numbers = {words: ", ".join(shorten_names(map(str, stages))) for words, stages in stages_by_words.items()}
    return "; ".join(f"stage{'s' if len(stages) > 1 else ''} {numbers[words]}: {words}" for words, stages in stages_by_words.items())


def with_fewest_recomputed_layers(pricer: Pricer, layout: Layout) -> PricedLayout | None:
    """Return `layout`, which recomputes all layers, with fewer, priced; None where all must be, and where not even all fit."""
    if schedule_of(layout).has_replicas or layout.num_stages > layout.pipeline:
        return None
    try:
        sites = balanced_sites(pricer, layout)
        counts = [_min_recomputed_layers(pricer, layout, sites, stage) for stage in range(layout.num_stages)]
        lengths = None if None in counts else [count or 0 for count in counts]
        if lengths is None or not any(lengths) or lengths == [_num_layers(pricer, layout, sites, s) for s in range(layout.num_stages)]:
            return None
        counts_text = write_counts(lengths if len(set(lengths)) > 1 else lengths[:1])
        return price(pricer, replace(layout, recompute=f"{layout.recompute}:{counts_text}"), sites)
    except (Infeasible, LayoutError):
        return None


def _num_layers(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int) -> int:
    return len(stage_pricer(pricer, layout, stage).layer_costs(layout, sites, stage))


def _min_recomputed_layers(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int) -> int | None:
    """Return how many layers of a stage are recomputed at the least; None where it does not fit with all of them."""
    have, layers = stage_device_memory(pricer, layout, stage), _num_layers(pricer, layout, sites, stage)
    counts: list[int] = [*range(0, layers, layout.segment), layers]

    def fits(count: int) -> bool:
        candidate = replace(layout, recompute=f"{layout.recompute}:{count}") if count else replace(layout, recompute="none", segment=1)
        return pricer.stage_memories(candidate, sites, (stage,))[0].alone.total <= have

    if not fits(layers):
        return None
    low, high = -1, len(counts) - 1  # tried[high] fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(counts[middle]) else (middle, high)
    return counts[high]
