"""Which layers' activations stay on the device, which move to the host, which are computed again (KARMA: Wahib et al., SC 2020).

In: a pricer, a layout that does not fit, where its stages begin. Out: the same layout with layers of every stage moved and repeated under
which it fits and is fastest: moving costs nothing while copies hide behind the stage's compute (`weft.cost.copies`), repeating costs a
forward, and stages do not share memory, so the fastest of each stage are the fastest of all. `choose` is that choice among the layers
of one stage, in a model of bytes and seconds that is `memory_of`'s and `Copies`' own; what it finds is held against the prices.

Not modelled: ranks with several stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from weft.cost.base import NOTHING, Ends, Load
from weft.cost.compute import Seconds
from weft.cost.copies import Copies
from weft.cost.memory import MARGIN, in_flight
from weft.cost.step import Pricer
from weft.errors import Infeasible, LayoutError
from weft.plan.layout import BOTH_WAYS, Layout
from weft.plan.ranges import shortened, spelled
from weft.plan.residency import LayerChoice
from weft.solve.mixed import memory_of, owner
from weft.solve.timing import Priced, balanced, clocked, price
from weft.units import format_bytes, format_seconds

KEEP, SWAP, DROP = "keep", "swap", "drop"
CHOICES = (KEEP, SWAP, DROP)
FIRST = (SWAP, DROP, KEEP)  # of equal choices the one that moves the first layers, repeats the next and keeps the last
_SWAP, _DROP, _KEEP = range(len(FIRST))
_EXACT = 5  # layers up to which every choice is tried
_PAIRS = 12  # layers up to which two are changed at a time
_ENDS = 2  # layers that may differ from all the others, which are alike: a stage's first and last
_TIGHTENED = 16  # times that a choice that the prices refuse is made again with less room

Choices = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """What a stage's layers have: `limit_bytes` for what they keep and what works on it, of `flying` microbatches at once.

    `compute`: seconds of the stage without copies. `ends`: what stands before and behind the layers. `loads`: layers that move are on the
    device at once, the one that is worked on and those that come meanwhile.
    """

    limit_bytes: float
    compute: Seconds
    copies: Copies
    flying: float = 1.0
    ends: Ends = NOTHING
    loads: int = 1


def rows(every: Iterable[Sequence[str]]) -> NDArray[np.int8]:
    """Choices as `Stage` weighs them."""
    return np.array([[FIRST.index(one) for one in choices] for choices in every], dtype=np.int8)


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's layers as arrays, by which many choices are weighed at once.

    Rows of `tried` (`rows`) are choices as places in `FIRST`, its columns layers.

    >>> two, room = Stage([Load("a", 1, 4, 1), Load("b", 1, 4, 1)]), Room(8, Seconds(2, 4), Copies(0.25, beside=False))
    >>> tried = rows([(KEEP, KEEP), (SWAP, KEEP), (DROP, KEEP), (DROP, DROP)])
    >>> two.seconds(tried, room), two.bytes(tried, room)
    (array([6., 8., 7., 8.]), array([8., 4., 5., 5.]))
    """

    layers: Sequence[Load]

    @cached_property
    def _of(self) -> dict[str, NDArray[np.float64]]:
        names = ("forward_s", "saved_bytes", "entering_bytes", "collectives_s", "working_bytes")
        found = {name: np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64) for name in names}
        back = [layer.saved_bytes if layer.back_bytes is None else layer.back_bytes for layer in self.layers]
        return found | {"back_bytes": np.array(back, dtype=np.float64)}

    def seconds(self, tried: NDArray[np.int8], room: Room) -> NDArray[np.float64]:
        """Seconds of one microbatch, forward and back, of every choice."""
        of = self._of
        moved = np.where(tried == _SWAP, of["saved_bytes"], 0.0).sum(1)
        again = np.where(tried == _DROP, of["forward_s"], 0.0).sum(1)
        collectives = np.where(tried == _DROP, of["collectives_s"], 0.0).sum(1)
        compute = [room.compute + Seconds(0.0, float(more)) for more in again]
        whole = [room.copies.around(one, float(size)) if size else one for one, size in zip(compute, moved, strict=True)]
        found: NDArray[np.float64] = np.array([one.total for one in whole]) + collectives
        return found

    def bytes(self, tried: NDArray[np.int8], room: Room) -> NDArray[np.float64]:
        """Bytes on the device when it holds most: in the backward of one layer, when what those behind it kept is gone."""
        of = self._of
        saved, entering = of["saved_bytes"], of["entering_bytes"]
        moved, again = tried == _SWAP, tried == _DROP
        largest = np.where(moved, saved, 0.0).max(1, initial=0.0)[:, None]
        stays = np.where(moved, 0.0, np.where(again, entering, saved))
        there = np.where(moved, of["back_bytes"] + (room.loads - 1) * largest, np.where(again, np.maximum(0.0, saved - entering), 0.0))
        behind = stays[:, ::-1].cumsum(1)[:, ::-1]  # of each layer and those behind it
        gone = room.ends.behind_bytes + behind - stays
        kept = stays.sum(1)
        most = (of["working_bytes"] + there - gone).max(1, initial=room.ends.last_bytes)
        found: NDArray[np.float64] = kept * room.flying + np.maximum(most, room.ends.first_bytes - room.ends.behind_bytes - kept)
        return found


Key = tuple[float, float, int, tuple[int, ...]]  # seconds, bytes where they are too many, layers that do not keep their own, and which


def choose(layers: Sequence[Load], room: Room, allowed: Sequence[str] = CHOICES) -> Choices:
    """The fastest choice for each layer that fits; of equals the one that moves and repeats least, and that does so first.

    Every choice is tried for few layers. For more, of several orders of the layers (as they come, and by the seconds that repeating them
    takes for the bytes that it frees) every number of the first is moved with the fewest after them repeated that fit; of layers that are
    alike no other choice is better, and a first and a last one that differ change little. Where more differ one or two are then changed at
    a time while that helps.

    Raises:
        Infeasible: nothing fits, with the bytes of the largest layer.

    >>> three = [Load(name, 1, 4, 0) for name in "abc"]
    >>> choose(three, Room(8, Seconds(3, 6), Copies(0.25, beside=True)))
    ('swap', 'keep', 'keep')
    """
    count = len(layers)
    stage = Stage(layers)
    codes = [FIRST.index(one) for one in allowed]

    def keys(tried: NDArray[np.int8]) -> list[Key]:
        need = stage.bytes(tried, room)
        fits = need <= room.limit_bytes * (1 + 1e-12)
        seconds = np.full(len(tried), inf)
        seconds[fits] = stage.seconds(tried[fits], room)
        # Sums differ by rounding.
        changed = (tried != _KEEP).sum(1)
        return [
            (float(f"{took:.9g}"), 0.0 if fit else size, number, tuple(row))
            for took, fit, size, number, row in zip(*(one.tolist() for one in (seconds, fits, need, changed, tried)), strict=True)
        ]

    if count <= _EXACT:
        best = min(keys(np.array(list(product(codes, repeat=count)), dtype=np.int8)))
    else:
        found = [rows([(KEEP,) * count]), *(one for order in _orders(layers) for one in _along(stage, room, allowed, order))]
        starts = sorted(set(keys(np.concatenate(found))))
        kinds = Counter((one.forward_s, one.saved_bytes, one.entering_bytes, one.collectives_s) for one in layers)
        alike = kinds.most_common(1)[0][1] >= count - _ENDS and starts[0][0] < inf
        best = starts[0] if alike else min(_improved(start, keys, codes) for start in starts[:4])
    if best[0] == inf:
        most = max(layer.saved_bytes for layer in layers)
        raise Infeasible(
            f"{count} layers do not fit in {format_bytes(room.limit_bytes)} whatever is moved or repeated; the largest keeps "
            f"{format_bytes(most)}: use more microbatches or stages, or allow more memory"
        )
    return tuple(FIRST[code] for code in best[-1])


def _orders(layers: Sequence[Load]) -> Iterator[list[int]]:
    """Orders in which the first are moved and those after them repeated."""
    every = list(range(len(layers)))
    yield every
    yield every[::-1]
    dear = sorted(every, key=lambda i: -layers[i].forward_s / max(layers[i].saved_bytes, 1.0))
    yield dear
    yield dear[::-1]


def _along(stage: Stage, room: Room, allowed: Sequence[str], order: Sequence[int]) -> Iterator[NDArray[np.int8]]:
    """For every number of the order's first layers that are moved, none of the others repeated (which may take less room than one does),
    and the fewest that must be: the next ones, and the last."""
    count = len(order)
    for from_the_end in (False, True):
        again = 0 if DROP not in allowed else count
        for moved in range(count + 1 if SWAP in allowed else 1):
            # The first of the rest, or its last, the last of all first.
            queue = order[moved:][::-1] if from_the_end else order[moved:]
            tried = np.full((2, count), _KEEP, dtype=np.int8)
            tried[:, order[:moved]] = _SWAP
            tried[1, queue[:again]] = _DROP
            again = min(again, len(queue))
            while again:
                tried[1, queue[again - 1]] = _KEEP
                if stage.bytes(tried[1:], room)[0] > room.limit_bytes:
                    tried[1, queue[again - 1]] = _DROP
                    break
                again -= 1
            yield tried


def _improved(start: Key, keys: Callable[[NDArray[np.int8]], list[Key]], codes: Sequence[int]) -> Key:
    """The best that changing one layer, or two of few, again and again leads to."""
    best, count = start, len(start[-1])
    sizes = (1, 2) if count <= _PAIRS else (1,)
    places = [one for size in sizes for one in combinations(range(count), size)]
    while True:
        tried = []
        for some in places:
            for new in product(codes, repeat=len(some)):
                row = list(best[-1])
                for place, one in zip(some, new, strict=True):
                    row[place] = one
                tried.append(row)
        found = min(keys(np.array(tried, dtype=np.int8)))
        if found >= best:
            return best
        best = found


def resident(pricer: Pricer, layout: Layout, sites: Sequence[str], allowed: Sequence[str] = CHOICES) -> Layout | None:
    """`layout`, which neither repeats nor moves layers, with those repeated and moved under which every rank fits its device.

    None where it fits without, where all layers would be repeated or nothing fits, and where ranks have several stages.
    """
    if layout.chunks > 1 or layout.schedule in BOTH_WAYS:
        return None
    found = []
    for stage in range(layout.num_stages):
        choices = _of_stage(pricer, layout, sites, stage, allowed)
        if choices is None:
            return None
        found.append((owner(pricer, layout, stage).loads(layout, sites, stage), choices))
    every = {choice for _, choices in found for choice in choices}
    if every in ({KEEP}, {DROP}):
        return None
    return worded(layout, [([layer.name for layer in layers], choices) for layers, choices in found])


def worded(layout: Layout, stages: Sequence[tuple[Sequence[str], Choices]]) -> Layout:
    """`layout` with the choices of every stage's layers as words: counts where the first are moved and the next repeated, names elsewhere.

    >>> str(worded(Layout(), [(["h.0", "h.1", "h.2"], (SWAP, DROP, KEEP))]))
    'data=1 tensor=1 pipeline=1 recompute=full:1 offload=activations:1'
    >>> str(worded(Layout(), [(["h.0", "h.1", "h.2"], (KEEP, DROP, SWAP))]))
    'data=1 tensor=1 pipeline=1 recompute=full:h.1 offload=activations:h.2'
    """
    moved = [[name for name, one in zip(names, choices, strict=True) if one == SWAP] for names, choices in stages]
    rests = [[(name, one) for name, one in zip(names, choices, strict=True) if one != SWAP] for names, choices in stages]
    again = [[name for name, one in rest if one == DROP] for rest in rests]
    first = all(list(names[: len(some)]) == some for (names, _), some in zip(stages, moved, strict=True))
    after = all([name for name, _ in rest[: len(some)]] == some for rest, some in zip(rests, again, strict=True))
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
    one, have = owner(pricer, layout, stage), memory_of(pricer, layout, stage)
    layers = one.loads(layout, sites, stage)

    def needs(choices: Choices) -> float:
        mine = ([layer.name for layer in layers], choices)
        every = [mine if s == stage else ([], ()) for s in range(layout.num_stages)]
        return pricer.held(worded(layout, every), sites, (stage,))[0].alone.total

    kept = (KEEP,) * len(layers)
    without = needs(kept)
    if without <= have:
        return kept
    (cost,) = pricer.stages(layout, sites, only=(stage,))
    flying = in_flight(layout.schedule, layout.pipeline, layout.rank_of(stage), layout.microbatches, layout.chunks)
    room = Room(inf, cost.compute, one.copies(layout), flying, one.ends(layout, sites, stage), one.layers_moved)
    weighed = Stage(layers)
    limit = float(weighed.bytes(rows([kept]), room)[0]) - (without - have) / (1 + MARGIN)
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


def _eased(stage: Stage, room: Room, choices: Choices, fits: Callable[[Choices], bool]) -> Choices:
    """The same with every layer kept that there is room for after all, the dearest first."""
    layers = stage.layers
    refused: set[tuple[str, float, float]] = set()
    dear = sorted(range(len(layers)), key=lambda i: (-layers[i].forward_s, -i))
    for i in dear:
        alike = (choices[i], layers[i].forward_s, layers[i].saved_bytes)
        if choices[i] == KEEP or alike in refused:
            continue
        tried = (*choices[:i], KEEP, *choices[i + 1 :])
        new, old = stage.seconds(rows([tried, choices]), room).tolist()
        if new < old and fits(tried):
            choices = tried
        else:
            refused.add(alike)
    return choices


def housed(pricer: Pricer, layout: Layout, allowed: Sequence[str] = CHOICES) -> Priced | None:
    """`resident` with the layout's balanced stages, timed by the clock; None where that has none."""
    try:
        sites = balanced(pricer, layout) if layout.num_stages > 1 else ()
        found = resident(pricer, layout, sites, allowed)
        return None if found is None else clocked(pricer, price(pricer, found, sites))
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
        layers, copies = one.loads(inner, sites, stage), one.copies(inner)
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
