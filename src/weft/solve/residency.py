"""Which layers' activations stay on the device, which move to the host, which are computed again (KARMA: Wahib et al., SC 2020).

In: a stage's layers with their bytes and seconds, the room that they have. Out: a choice for each layer. `choose` is that choice among the
layers of one stage, `weft.solve.several` among those of several stages on one rank, in a model of bytes and seconds that is `memory_of`'s
and `Copies`' own; what it finds is held against the prices (`weft.solve.housing`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from math import inf

import numpy as np
from numpy.typing import NDArray

from weft.cost.devices.compute import Seconds
from weft.cost.devices.copies import Copies
from weft.cost.stages.base import NOTHING, Ends, Load
from weft.errors import Infeasible
from weft.units import format_bytes

KEEP, SWAP, DROP = "keep", "swap", "drop"
CHOICES = (KEEP, SWAP, DROP)
FIRST = (SWAP, DROP, KEEP)  # of equal choices the one that moves the first layers, repeats the next and keeps the last
_SWAP, _DROP, _KEEP = range(len(FIRST))
_EXACT = 5  # layers up to which every choice is tried
_PAIRS = 12  # layers up to which two are changed at a time
_ENDS = 2  # layers that may differ from all the others, which are alike: a stage's first and last

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
        arrays = {name: np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64) for name in names}
        back = [layer.saved_bytes if layer.back_bytes is None else layer.back_bytes for layer in self.layers]
        return arrays | {"back_bytes": np.array(back, dtype=np.float64)}

    def seconds(self, tried: NDArray[np.int8], room: Room) -> NDArray[np.float64]:
        """Seconds of one microbatch, forward and back, of every choice."""
        of = self._of
        moved = np.where(tried == _SWAP, of["saved_bytes"], 0.0).sum(1)
        again = np.where(tried == _DROP, of["forward_s"], 0.0).sum(1)
        collectives = np.where(tried == _DROP, of["collectives_s"], 0.0).sum(1)
        compute = [room.compute + Seconds(0.0, float(more)) for more in again]
        computes = [room.copies.around(one, float(size)) if size else one for one, size in zip(compute, moved, strict=True)]
        seconds: NDArray[np.float64] = np.array([one.total for one in computes]) + collectives
        return seconds

    def bytes(self, tried: NDArray[np.int8], room: Room) -> NDArray[np.float64]:
        """Bytes on the device when it holds most: in the backward of one layer, when what those behind it kept is gone."""
        return self.kept(tried) * room.flying + self.most(tried, room)

    def kept(self, tried: NDArray[np.int8]) -> NDArray[np.float64]:
        """Bytes that stay of one microbatch until its backward."""
        amounts: NDArray[np.float64] = self._stays(tried).sum(1)
        return amounts

    def _stays(self, tried: NDArray[np.int8]) -> NDArray[np.float64]:
        saved, entering = self._of["saved_bytes"], self._of["entering_bytes"]
        return np.where(tried == _SWAP, 0.0, np.where(tried == _DROP, entering, saved))

    def most(self, tried: NDArray[np.int8], room: Room) -> NDArray[np.float64]:
        """Bytes beside those, of the microbatch that goes backward: in the fullest layer, less what is gone by then."""
        of = self._of
        saved, entering = of["saved_bytes"], of["entering_bytes"]
        moved, again = tried == _SWAP, tried == _DROP
        largest = np.where(moved, saved, 0.0).max(1, initial=0.0)[:, None]
        stays = self._stays(tried)
        there = np.where(moved, of["back_bytes"] + (room.loads - 1) * largest, np.where(again, np.maximum(0.0, saved - entering), 0.0))
        behind = stays[:, ::-1].cumsum(1)[:, ::-1]  # of each layer and those behind it
        gone = room.ends.behind_bytes + behind - stays
        stay_bytes = stays.sum(1)
        most = (of["working_bytes"] + there - gone).max(1, initial=room.ends.last_bytes)
        most_bytes: NDArray[np.float64] = np.maximum(most, room.ends.first_bytes - room.ends.behind_bytes - stay_bytes)
        return most_bytes


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
        candidates = [rows([(KEEP,) * count]), *(one for order in _orders(layers) for one in _along(stage, room, allowed, order))]
        starts = sorted(set(keys(np.concatenate(candidates))))
        kinds = Counter((one.forward_s, one.saved_bytes, one.entering_bytes, one.collectives_s) for one in layers)
        is_uniform = kinds.most_common(1)[0][1] >= count - _ENDS and starts[0][0] < inf
        best = starts[0] if is_uniform else min(_improved(start, keys, codes) for start in starts[:4])
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
        least = min(keys(np.array(tried, dtype=np.int8)))
        if least >= best:
            return best
        best = least
