"""A layout that does not fit, with the fewest layers of its stages moved and repeated under which it does, by the prices.

In: a pricer, a layout, where its stages begin. Out: the same layout with layers of every stage moved and repeated under which it fits and
is fastest: moving costs nothing while copies hide behind the stage's compute (`devices/copies`), repeating costs a forward. Stages of
different ranks do not share memory, so the fastest of each rank are the fastest of all. No choice takes less than `least_more_s`.

Not modelled: stages that are on several ranks.
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

_TIGHTENED = 16  # times that a choice that the prices refuse is made again with less room


def resident(pricer: Pricer, layout: Layout, sites: Sequence[str], allowed: Sequence[str] = CHOICES) -> Layout | None:
    """`layout`, which neither repeats nor moves layers, with those repeated and moved under which every rank fits its device.

    None where it fits without, where all layers would be repeated or nothing fits, and where stages are on several ranks.
    """
    schedule = schedule_of(layout)
    if schedule.has_replicas:
        return None
    by_stage: dict[int, Choices] = {}
    for rank, mine in enumerate(schedule.stages_of):
        if len(mine) > 1:
            choices = _of_rank(pricer, layout, sites, rank, allowed)
        else:
            alone = _of_stage(pricer, layout, sites, mine[0], allowed)
            choices = None if alone is None else [alone]
        if choices is None:
            return None
        by_stage |= dict(zip(mine, choices, strict=True))
    every = {choice for choices in by_stage.values() for choice in choices}
    if every in ({KEEP}, {DROP}):
        return None
    stages = range(layout.num_stages)
    names = [[layer.name for layer in owner(pricer, layout, s).loads(layout.of_stage(s), sites, s)] for s in stages]
    return worded(layout, [(mine, by_stage[stage]) for stage, mine in enumerate(names)])


def worded(layout: Layout, stages: Sequence[tuple[Sequence[str], Choices]]) -> Layout:
    """`layout` with the choices of every stage's layers as words: counts where the first are moved and the next repeated, names elsewhere.

    >>> str(worded(Layout(), [(["h.0", "h.1", "h.2"], (SWAP, DROP, KEEP))]))
    'data=1 tensor=1 pipeline=1 recompute=full:1 offload=activations:1'
    >>> str(worded(Layout(), [(["h.0", "h.1", "h.2"], (KEEP, DROP, SWAP))]))
    'data=1 tensor=1 pipeline=1 recompute=full:h.1 offload=activations:h.2'
    """
    moved = [[name for name, one in zip(names, choices, strict=True) if one == SWAP] for names, choices in stages]
    left = [[(name, one) for name, one in zip(names, choices, strict=True) if one != SWAP] for names, choices in stages]
    again = [[name for name, one in rest if one == DROP] for rest in left]
    first = all(list(names[: len(some)]) == some for (names, _), some in zip(stages, moved, strict=True))
    after = all([name for name, _ in rest[: len(some)]] == some for rest, some in zip(left, again, strict=True))
    if not any(moved):
        offload = layout.offload
    else:
        offload = str(_choice("offload", "all" if layout.moves_optimizer else "activations", moved, first))
    return replace(layout, offload=offload, recompute=str(_choice("recompute", "full", again, first and after)) if any(again) else "none")


def _choice(key: str, kind: str, layers: Sequence[Sequence[str]], counted: bool) -> LayerChoice:
    if not counted:
        return LayerChoice(key, kind, (), tuple(spelled(name) for names in layers for name in names))
    counts = tuple(len(names) for names in layers)
    return LayerChoice(key, kind, counts if len(set(counts)) > 1 else counts[:1])


def _of_stage(pricer: Pricer, layout: Layout, sites: Sequence[str], stage: int, allowed: Sequence[str]) -> Choices | None:
    """The choice for one stage's layers, by the prices' own bytes; None where nothing fits."""
    layout = layout.of_stage(stage)
    one, have = owner(pricer, layout, stage), memory_of(pricer, layout, stage)
    layers = one.loads(layout, sites, stage)

    def needs(choices: Choices) -> float:
        mine = ([layer.name for layer in layers], choices)
        every = [mine if s == stage else ([], ()) for s in range(layout.num_stages)]
        return pricer.held(worded(layout, every), sites, (stage,))[0].alone.total

    all_kept = (KEEP,) * len(layers)
    without = needs(all_kept)
    if without <= have:
        return all_kept
    (cost,) = pricer.stages(layout, sites, only=(stage,))
    flying = schedule_of(layout).in_flight(stage)
    room = Room(inf, cost.compute, one.devices.copies(layout), flying, one.ends(layout, sites, stage), one.devices.layers_moved)
    weighed = Stage(layers)
    limit = float(weighed.bytes(rows([all_kept]), room)[0]) - (without - have) / (1 + MARGIN)
    for _ in range(_TIGHTENED):
        try:
            choices = choose(layers, replace(room, limit_bytes=limit), allowed)
        except Infeasible:
            return None
        need = needs(choices)
        if need <= have:
            return _eased(weighed, room, choices, lambda tried: needs(tried) <= have)
        limit = min(limit - (need - have) / (1 + MARGIN), 0.999 * float(weighed.bytes(rows([choices]), room)[0]))
    return None


def _of_rank(pricer: Pricer, layout: Layout, sites: Sequence[str], rank: int, allowed: Sequence[str]) -> list[Choices] | None:
    """The choices for the layers of a rank's several stages, by the prices; None where nothing fits."""
    schedule = schedule_of(layout)
    mine = schedule.stages_of[rank]
    have = memory_of(pricer, layout, mine[0])
    layers = [len(owner(pricer, layout, stage).loads(layout, sites, stage)) for stage in mine]
    held = pricer.held(layout, sites, mine)
    short = together(held, schedule, rank).total - have
    if short <= 0:
        return [(KEEP,) * count for count in layers]
    tried = [numbers(count, SWAP in allowed, DROP in allowed) for count in layers]
    costs: list[list[StageCost]] = [[] for _ in mine]
    for moved, again in sorted({counts for some in tried for counts in some}):
        here = [i for i, counts in enumerate(tried) if (moved, again) in counts]
        one = worded(layout, [([str(i) for i in range(moved + again)], (SWAP,) * moved + (DROP,) * again)])
        for i, cost in zip(here, pricer.stages(one, sites, only=[mine[i] for i in here]), strict=True):
            costs[i].append(cost)
    now = schedule.held(rank)
    besides = now.entering @ np.array([m.entering_bytes for m in held]) + now.returning @ np.array([m.leaving_bytes for m in held])
    several = Several([Ways.of(sorted(c), k) for c, k in zip(tried, costs, strict=True)], now, besides)
    try:
        chosen = several.choose(float(several.bytes([0] * len(mine)).max()) - short / (1 + MARGIN))
    except Infeasible:
        return None
    return [(SWAP,) * k + (DROP,) * d + (KEEP,) * (count - k - d) for (k, d), count in zip(chosen, layers, strict=True)]


def least_more_s(pricer: Pricer, layout: Layout, sites: Sequence[str], rank: int, allowed: Sequence[str]) -> float:
    """Seconds of one microbatch, both ways, that moving and repeating layers takes of a rank at the least; infinite where it cannot fit.

    `layout` neither repeats nor moves layers. At the moment at which most of what could be freed must be, repeating a layer frees what it
    keeps at most, and moving one as much; both in parts (a fractional knapsack), the copies of all stages beside the compute of all. What
    is there besides only grows.
    """
    schedule = schedule_of(layout)
    mine = schedule.stages_of[rank]
    have = memory_of(pricer, layout, mine[0])
    held = pricer.held(layout, sites, mine)
    short = (together(held, schedule, rank).total - have) / (1 + MARGIN)
    if short <= 0:
        return 0.0
    one = owner(pricer, layout, mine[0])
    loads = [one.loads(layout, sites, stage) for stage in mine]
    counts, spare = _moments(schedule, rank, held)
    free = counts @ np.array([sum(layer.saved_bytes for layer in layers) for layers in loads])  # what could be freed, by moment
    tightest = int(np.argmax(np.maximum(0.0, short - spare) / np.maximum(free, 1.0)))
    short -= float(spare[tightest])
    if short > free[tightest] * (1 + 1e-9):
        return inf
    layers = [(count, layer) for count, layers in zip(counts[tightest].tolist(), loads, strict=True) for layer in layers]
    saved = np.array([count * layer.saved_bytes for count, layer in layers])
    again = np.array([layer.forward_s + layer.collectives_s for _, layer in layers])
    copies, most = one.devices.copies(layout), float(counts[tightest].max())  # microbatches of which a byte that moves is free
    compute = sum((cost.compute for cost in pricer.stages(layout, sites, only=mine)), Seconds())
    order = np.argsort(again / np.maximum(saved, 1.0), kind="stable") if DROP in allowed else np.zeros(0, dtype=np.intp)
    freed, took = (np.concatenate(([0.0], np.cumsum(column[order]))) for column in (saved, again))
    # Moving more takes convexly more and repeating less convexly less, so the least is where one of them turns.
    turns = [seconds / copies.seconds_per_byte / (1 - HOST_SLOWS) for seconds in (compute.forward, compute.backward)]
    moved = np.array([0.0, *turns, *((short - freed) / most)] if SWAP in allowed else [0.0])
    enough = (moved * most <= short * (1 + 1e-9)) & (short - moved * most <= freed[-1] * (1 + 1e-9))
    moved = np.unique(moved[(moved >= 0) & enough])
    repeats = np.interp(short - moved * most, freed, took)
    steps = (copies.around(compute, size).total - compute.total + more for size, more in zip(moved.tolist(), repeats.tolist(), strict=True))
    return min(steps, default=inf)


def _moments(schedule: Schedule, rank: int, held: Sequence[StageMemory]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[moment, stage of the rank]: microbatches of which moving or repeating frees what layers keep, those that wait for their backward but
    have not made it again for their weights part; and [moment]: bytes less than when the rank holds most."""
    if len(held) == 1 and not schedule.splits_backward:
        return np.array([[schedule.in_flight(schedule.stages_of[rank][0])]]), np.zeros(1)
    now = schedule.held(rank)
    there = sum(by_moment(held, now))
    return (now.in_flight - now.noted).astype(np.float64), np.max(there) - there


def _eased(stage: Stage, room: Room, choices: Choices, fits: Callable[[Choices], bool]) -> Choices:
    """The same with every layer kept that there is room for after all, the dearest first."""
    layers = stage.layers
    refused: set[tuple[str, float, float]] = set()
    dear = sorted(range(len(layers)), key=lambda i: (-layers[i].forward_s, -i))
    for i in dear:
        kind = (choices[i], layers[i].forward_s, layers[i].saved_bytes)
        if choices[i] == KEEP or kind in refused:
            continue
        tried = (*choices[:i], KEEP, *choices[i + 1 :])
        new, old = stage.seconds(rows([tried, choices]), room).tolist()
        if new < old and fits(tried):
            choices = tried
        else:
            refused.add(kind)
    return choices


def housed(pricer: Pricer, layout: Layout, allowed: Sequence[str] = CHOICES) -> Priced | None:
    """`resident` with the layout's balanced stages, in closed form; None where that has none."""
    try:
        sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
        layout_found = resident(pricer, layout, sites, allowed)
        return None if layout_found is None else price(pricer, layout_found, sites)
    except (Infeasible, LayoutError):
        return None


def told(pricer: Pricer, layout: Layout, sites: Sequence[str]) -> str:
    """What moves and what is repeated, in words with what it costs; empty where no layers are picked."""
    which = layout.residency
    if (layout.moves_layers and not which.offload.picks) or not (which.recompute.picks or which.offload.picks):
        return ""
    said: dict[str, list[int]] = {}
    for stage in range(layout.num_stages):
        inner = layout.of_stage(stage)
        one = owner(pricer, inner, stage)
        layers, copies = one.loads(inner, sites, stage), one.devices.copies(inner)
        names = [layer.name for layer in layers]
        moved, again = which.moved(stage, names), which.repeated(stage, names)
        size = one.state(inner, sites, stage).moved_bytes if moved else 0.0
        repeats = sum(layer.forward_s + layer.collectives_s for layer in layers if layer.name in again)
        how = "beside the compute" if copies.beside else "in the compute's time"
        moving = f" ({format_bytes(size)} and {format_seconds(size * copies.seconds_per_byte)} each way of a microbatch, {how})"
        words = (
            f"of {len(layers)} layers {len(moved)} move to the host{moving if moved else ''}, {len(again)} are computed again"
            f"{f' ({format_seconds(repeats)})' if again else ''}, {len(layers) - len(moved) - len(again)} stay"
        )
        said.setdefault(words, []).append(stage)
    if len(said) == 1:
        return f"{next(iter(said))}{', in every stage' if layout.num_stages > 1 else ''}"
    numbers = {words: ", ".join(shortened(map(str, stages))) for words, stages in said.items()}
    return "; ".join(f"stage{'s' if len(stages) > 1 else ''} {numbers[words]}: {words}" for words, stages in said.items())
