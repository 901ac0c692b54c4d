"""Activation memory of a layout that does not fit: find the cheapest set of layers to offload or recompute so that it fits, by the prices.

Offloading is free while copies overlap the stage's compute (`devices/copies`); recomputing costs a forward. Stages on different ranks do
not share memory, so the fastest choice of each rank is the fastest of all. No choice takes less than `added_time_lower_bound_s`. Not
modelled: stages that are on several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from weft.cost.devices.compute import Seconds
from weft.cost.devices.copies import HOST_SLOWS
from weft.cost.memory.memory import MARGIN, StageMemory
from weft.cost.stages.stage import StageCost, by_moment, together
from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.layout import Layout
from weft.plan.ranges import shortened, spelled
from weft.plan.residency import LayerChoice
from weft.schedules import Schedule, schedule_of
from weft.solve.mixed import memory_of, owner
from weft.solve.residency import CHOICES, DROP, KEEP, SWAP, Choices, Room, Stage, choose, rows
from weft.solve.several import Several, Ways, numbers
from weft.solve.timing import Priced, balanced, price
from weft.units import format_bytes, format_seconds

_TIGHTENED = 16  # retries with a smaller limit of a choice that does not fit by the prices


def resident(pricer: Pricer, layout: Layout, sites: Sequence[str], allowed: Sequence[str] = CHOICES) -> Layout | None:
    """Return `layout`, which neither recomputes nor offloads layers, with the layers to recompute and offload so that every rank fits.

    None where it fits without, where all layers would be recomputed or nothing fits, and where stages are on several ranks.
    """
    schedule = schedule_of(layout)
    if schedule.has_replicas:
        return None
    by_stage: dict[int, Choices] = {}
    for rank, stages_here in enumerate(schedule.stages_of):
        if len(stages_here) > 1:
            choices = _of_rank(pricer, layout, sites, rank, allowed)
        else:
            stage_choice = _of_stage(pricer, layout, sites, stages_here[0], allowed)
            choices = None if stage_choice is None else [stage_choice]
        if choices is None:
            return None
        by_stage |= dict(zip(stages_here, choices, strict=True))
    kinds = {choice for choices in by_stage.values() for choice in choices}
    if kinds in ({KEEP}, {DROP}):
        return None
    stages = range(layout.num_stages)
    names = [[layer.name for layer in owner(pricer, layout, s).loads(layout.of_stage(s), sites, s)] for s in stages]
    return worded(layout, [(stages_here, by_stage[stage]) for stage, stages_here in enumerate(names)])


def worded(layout: Layout, stages: Sequence[tuple[Sequence[str], Choices]]) -> Layout:
    """Return `layout` with the choices of every stage's layers as its keys: counts where the first are offloaded and the next recomputed,
    names elsewhere.

    >>> str(worded(Layout(), [(["h.0", "h.1", "h.2"], (SWAP, DROP, KEEP))]))
    'data=1 tensor=1 pipeline=1 recompute=full:1 offload=activations:1'
    >>> str(worded(Layout(), [(["h.0", "h.1", "h.2"], (KEEP, DROP, SWAP))]))
    'data=1 tensor=1 pipeline=1 recompute=full:h.1 offload=activations:h.2'
    """
    offloaded = [[name for name, choice in zip(names, choices, strict=True) if choice == SWAP] for names, choices in stages]
    remaining = [[(name, choice) for name, choice in zip(names, choices, strict=True) if choice != SWAP] for names, choices in stages]
    recomputed = [[name for name, choice in rest if choice == DROP] for rest in remaining]
    first_offloaded = all(list(names[: len(picked)]) == picked for (names, _), picked in zip(stages, offloaded, strict=True))
    next_recomputed = all([name for name, _ in rest[: len(picked)]] == picked for rest, picked in zip(remaining, recomputed, strict=True))
    if not any(offloaded):
        offload = layout.offload
    else:
        offload = str(_choice("offload", "all" if layout.moves_optimizer else "activations", offloaded, first_offloaded))
    recompute = str(_choice("recompute", "full", recomputed, first_offloaded and next_recomputed)) if any(recomputed) else "none"
    return replace(layout, offload=offload, recompute=recompute)


def _choice(key: str, kind: str, layers: Sequence[Sequence[str]], counted: bool) -> LayerChoice:
    if not counted:
        return LayerChoice(key, kind, (), tuple(spelled(name) for names in layers for name in names))
    counts = tuple(len(names) for names in layers)
    return LayerChoice(key, kind, counts if len(set(counts)) > 1 else counts[:1])


def _of_stage(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int, allowed: Sequence[str]) -> Choices | None:
    """Choose for one stage's layers, by the prices' own bytes; None where nothing fits."""
    layout = layout.of_stage(stage)
    pricer_here, have = owner(pricer, layout, stage), memory_of(pricer, layout, stage)
    layers = pricer_here.loads(layout, sites, stage)

    def needs(choices: Choices) -> float:
        chosen = ([layer.name for layer in layers], choices)
        by_stage = [chosen if s == stage else ([], ()) for s in range(layout.num_stages)]
        return pricer.held(worded(layout, by_stage), sites, (stage,))[0].alone.total

    all_kept = (KEEP,) * len(layers)
    kept_bytes = needs(all_kept)
    if kept_bytes <= have:
        return all_kept
    (cost,) = pricer.stages(layout, sites, only=(stage,))
    in_flight = schedule_of(layout).in_flight(stage)
    devices = pricer_here.devices
    room = Room(inf, cost.compute, devices.copies(layout), in_flight, pricer_here.ends(layout, sites, stage), devices.layers_moved)
    arrays = Stage(layers)
    limit = float(arrays.bytes(rows([all_kept]), room)[0]) - (kept_bytes - have) / (1 + MARGIN)
    for _ in range(_TIGHTENED):
        try:
            choices = choose(layers, replace(room, limit_bytes=limit), allowed)
        except Infeasible:
            return None
        need = needs(choices)
        if need <= have:
            return _eased(arrays, room, choices, lambda tried: needs(tried) <= have)
        limit = min(limit - (need - have) / (1 + MARGIN), 0.999 * float(arrays.bytes(rows([choices]), room)[0]))
    return None


def _of_rank(pricer: Pricer, layout: Layout, sites: Sequence[str], rank: int, allowed: Sequence[str]) -> list[Choices] | None:
    """Choose for the layers of a rank's several stages, by the prices; None where nothing fits."""
    schedule = schedule_of(layout)
    stages = schedule.stages_of[rank]
    have = memory_of(pricer, layout, stages[0])
    layers = [len(owner(pricer, layout, stage).loads(layout, sites, stage)) for stage in stages]
    memories = pricer.held(layout, sites, stages)
    excess = together(memories, schedule, rank).total - have
    if excess <= 0:
        return [(KEEP,) * count for count in layers]
    options = [numbers(count, SWAP in allowed, DROP in allowed) for count in layers]
    costs: list[list[StageCost]] = [[] for _ in stages]
    for offloaded, recomputed in sorted({counts for counts_of_stage in options for counts in counts_of_stage}):
        indices = [i for i, counts in enumerate(options) if (offloaded, recomputed) in counts]
        candidate = worded(layout, [([str(i) for i in range(offloaded + recomputed)], (SWAP,) * offloaded + (DROP,) * recomputed)])
        for i, cost in zip(indices, pricer.stages(candidate, sites, only=[stages[i] for i in indices]), strict=True):
            costs[i].append(cost)
    live = schedule.held(rank)
    entering, leaving = np.array([m.entering_bytes for m in memories]), np.array([m.leaving_bytes for m in memories])
    transient = live.entering @ entering + live.returning @ leaving
    shared = Several([Ways.of(sorted(c), k) for c, k in zip(options, costs, strict=True)], live, transient)
    try:
        chosen = shared.choose(float(shared.bytes([0] * len(stages)).max()) - excess / (1 + MARGIN))
    except Infeasible:
        return None
    return [(SWAP,) * k + (DROP,) * d + (KEEP,) * (count - k - d) for (k, d), count in zip(chosen, layers, strict=True)]


def least_more_s(pricer: Pricer, layout: Layout, sites: Sequence[str], rank: int, allowed: Sequence[str]) -> float:
    """Seconds of one microbatch, both ways, that offload and recompute add to a rank at the least; infinite where it cannot fit.

    `layout` neither recomputes nor offloads layers. At the tightest moment recomputing a layer frees at most its saved tensors, and so does
    offloading it; fractions of layers are allowed (a fractional knapsack), and copies of all stages overlap the compute of all. Transient
    memory only grows.
    """
    schedule = schedule_of(layout)
    stages = schedule.stages_of[rank]
    have = memory_of(pricer, layout, stages[0])
    memories = pricer.held(layout, sites, stages)
    excess = (together(memories, schedule, rank).total - have) / (1 + MARGIN)
    if excess <= 0:
        return 0.0
    pricer_here = owner(pricer, layout, stages[0])
    layer_costs = [pricer_here.loads(layout, sites, stage) for stage in stages]
    counts, spare = _moments(schedule, rank, memories)
    free = counts @ np.array([sum(layer.saved_bytes for layer in layers) for layers in layer_costs])  # bytes that could be freed, by moment
    tightest = int(np.argmax(np.maximum(0.0, excess - spare) / np.maximum(free, 1.0)))
    excess -= float(spare[tightest])
    if excess > free[tightest] * (1 + 1e-9):
        return inf
    layers = [(count, layer) for count, layers in zip(counts[tightest].tolist(), layer_costs, strict=True) for layer in layers]
    saved = np.array([count * layer.saved_bytes for count, layer in layers])
    recompute_s = np.array([layer.forward_s + layer.collectives_s for _, layer in layers])
    copies, most = pricer_here.devices.copies(layout), float(counts[tightest].max())  # microbatches for which an offloaded byte is freed
    compute = sum((cost.compute for cost in pricer.stages(layout, sites, only=stages)), Seconds())
    order = np.argsort(recompute_s / np.maximum(saved, 1.0), kind="stable") if DROP in allowed else np.zeros(0, dtype=np.intp)
    freed, spent_s = (np.concatenate(([0.0], np.cumsum(column[order]))) for column in (saved, recompute_s))
    # Offload is convex in its bytes and recompute falls convexly, so the minimum is at a kink of one of them.
    kinks = [seconds / copies.seconds_per_byte / (1 - HOST_SLOWS) for seconds in (compute.forward, compute.backward)]
    offloaded = np.array([0.0, *kinks, *((excess - freed) / most)] if SWAP in allowed else [0.0])
    is_enough = (offloaded * most <= excess * (1 + 1e-9)) & (excess - offloaded * most <= freed[-1] * (1 + 1e-9))
    offloaded = np.unique(offloaded[(offloaded >= 0) & is_enough])
    recompute_times = np.interp(excess - offloaded * most, freed, spent_s)
    pairs = zip(offloaded.tolist(), recompute_times.tolist(), strict=True)
    return min((copies.around(compute, size).total - compute.total + added_s for size, added_s in pairs), default=inf)


def _moments(schedule: Schedule, rank: int, held: Sequence[StageMemory]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return [moment, stage of the rank], microbatches whose saved tensors offload or recompute would free (those that await their backward
    but have not recomputed for their weights part), and [moment], bytes below the rank's peak."""
    if len(held) == 1 and not schedule.splits_backward:
        return np.array([[schedule.in_flight(schedule.stages_of[rank][0])]]), np.zeros(1)
    live = schedule.held(rank)
    live_bytes = sum(by_moment(held, live))
    return (live.in_flight - live.noted).astype(np.float64), np.max(live_bytes) - live_bytes


def _eased(stage: Stage, room: Room, choices: Choices, fits: Callable[[Choices], bool]) -> Choices:
    """Keep every layer that there is memory for after all, the most expensive first."""
    layers = stage.layers
    refused: set[tuple[str, float, float]] = set()
    by_cost = sorted(range(len(layers)), key=lambda i: (-layers[i].forward_s, -i))
    for i in by_cost:
        kind = (choices[i], layers[i].forward_s, layers[i].saved_bytes)
        if choices[i] == KEEP or kind in refused:
            continue
        candidate = (*choices[:i], KEEP, *choices[i + 1 :])
        new, old = stage.seconds(rows([candidate, choices]), room).tolist()
        if new < old and fits(candidate):
            choices = candidate
        else:
            refused.add(kind)
    return choices


def housed(pricer: Pricer, layout: Layout, allowed: Sequence[str] = CHOICES) -> Priced | None:
    """Apply `choose_activation_memory` with the layout's balanced stages and price it in closed form; None where it finds nothing."""
    try:
        sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
        layout_found = resident(pricer, layout, sites, allowed)
        return None if layout_found is None else price(pricer, layout_found, sites)
    except (Infeasible, LayoutError):
        return None


def told(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> str:
    """Describe which layers are offloaded and recomputed, with what it costs; empty where no layers are selected."""
    residency = layout.residency
    if (layout.moves_layers and not residency.offload.picks) or not (residency.recompute.picks or residency.offload.picks):
        return ""
    stages_by_words: dict[str, list[int]] = {}
    for stage in range(layout.num_stages):
        inner = layout.of_stage(stage)
        pricer_here = owner(pricer, inner, stage)
        layers, copies = pricer_here.loads(inner, sites, stage), pricer_here.devices.copies(inner)
        names = [layer.name for layer in layers]
        offloaded, recomputed = residency.moved(stage, names), residency.repeated(stage, names)
        size = pricer_here.state(inner, sites, stage).moved_bytes if offloaded else 0.0
        recompute_s = sum(layer.forward_s + layer.collectives_s for layer in layers if layer.name in recomputed)
        overlap = "overlapping compute" if copies.beside else "not overlapping compute"
        copy_words = f" ({format_bytes(size)} and {format_seconds(size * copies.seconds_per_byte)} each way of a microbatch, {overlap})"
        words = (
            f"of {len(layers)} layers {len(offloaded)} are offloaded to the host{copy_words if offloaded else ''}, "
            f"{len(recomputed)} are recomputed{f' ({format_seconds(recompute_s)})' if recomputed else ''}, "
            f"{len(layers) - len(offloaded) - len(recomputed)} keep their activations"
        )
        stages_by_words.setdefault(words, []).append(stage)
    if len(stages_by_words) == 1:
        return f"{next(iter(stages_by_words))}{', in every stage' if layout.num_stages > 1 else ''}"
    numbers = {words: ", ".join(shortened(map(str, stages))) for words, stages in stages_by_words.items()}
    return "; ".join(f"stage{'s' if len(stages) > 1 else ''} {numbers[words]}: {words}" for words, stages in stages_by_words.items())
