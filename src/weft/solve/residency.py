"""Choose which layers keep their activations on the device, which offload them and which recompute them (KARMA: Wahib et al., SC 2020).

`choose_layers` decides for the layers of one stage, `weft.solve.shared_rank_memory` for several stages on one rank, in a model of bytes and
seconds that equals that of `memory_of` and `HostCopies`; `weft.solve.activation_memory` checks the result against the prices.
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

KEEP, SWAP, DROP = "keep", "offload", "recompute"
CHOICES = (KEEP, SWAP, DROP)
FIRST = (SWAP, DROP, KEEP)  # of equal choices, offload the first layers, recompute the next, keep the last
_SWAP, _DROP, _KEEP = range(len(FIRST))
_EXACT = 5  # layers, at most, for which every choice is tried
_PAIRS = 12  # layers, at most, for which two are changed at a time
_ENDS = 2  # layers that may differ from the others: a stage's first and last

Choices = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """Memory and time of a stage's layers: `limit_bytes` for saved tensors and workspaces, of `num_in_flight` microbatches at once.

    `compute`: seconds of the stage without copies. `unlayered`: cost of what is before and after the layers. `num_loaded_layers`:
    offloaded layers that are on the device at once, the one in backward and those being loaded.
    """

    limit_bytes: float
    compute: Seconds
    copies: Copies
    flying: float = 1.0
    ends: Ends = NOTHING
    loads: int = 1


def rows(every: Iterable[Sequence[str]]) -> NDArray[np.int8]:
    """Encode choices as `StageLayers` evaluates them."""
    return np.array([[FIRST.index(choice) for choice in choices] for choices in every], dtype=np.int8)


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers of a stage as arrays, so that many choices are evaluated at once.

    Rows of `tried` (`encode_choices`) are choices as indices into `PREFERENCE_ORDER`, its columns layers.

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
        """Seconds of one microbatch, forward and backward, of every choice."""
        arrays = self._of
        offloaded_bytes = np.where(tried == _SWAP, arrays["saved_bytes"], 0.0).sum(1)
        recompute_s = np.where(tried == _DROP, arrays["forward_s"], 0.0).sum(1)
        collectives = np.where(tried == _DROP, arrays["collectives_s"], 0.0).sum(1)
        compute = [room.compute + Seconds(0.0, float(added_s)) for added_s in recompute_s]
        computes = [room.copies.around(c, float(size)) if size else c for c, size in zip(compute, offloaded_bytes, strict=True)]
        seconds: NDArray[np.float64] = np.array([c.total for c in computes]) + collectives
        return seconds

    def bytes(self, tried: NDArray[np.int8], room: Room) -> NDArray[np.float64]:
        """Bytes on the device at the peak: in the backward of one layer, when the saved tensors of later layers are freed."""
        return self.kept(tried) * room.flying + self.most(tried, room)

    def kept(self, tried: NDArray[np.int8]) -> NDArray[np.float64]:
        """Bytes of one microbatch that stay on the device until its backward."""
        amounts: NDArray[np.float64] = self._stays(tried).sum(1)
        return amounts

    def _stays(self, tried: NDArray[np.int8]) -> NDArray[np.float64]:
        saved, entering = self._of["saved_bytes"], self._of["entering_bytes"]
        return np.where(tried == _SWAP, 0.0, np.where(tried == _DROP, entering, saved))

    def most(self, tried: NDArray[np.int8], room: Room) -> NDArray[np.float64]:
        """Further bytes, of the microbatch in backward: at the layer that needs most, less what is freed by then."""
        arrays = self._of
        saved, entering = arrays["saved_bytes"], arrays["entering_bytes"]
        is_offloaded, is_recomputed = tried == _SWAP, tried == _DROP
        largest = np.where(is_offloaded, saved, 0.0).max(1, initial=0.0)[:, None]
        stays = self._stays(tried)
        recomputed = np.where(is_recomputed, np.maximum(0.0, saved - entering), 0.0)
        there = np.where(is_offloaded, arrays["back_bytes"] + (room.loads - 1) * largest, recomputed)
        saved_from = stays[:, ::-1].cumsum(1)[:, ::-1]  # of each layer and the later ones
        freed = room.ends.behind_bytes + saved_from - stays
        stay_bytes = stays.sum(1)
        most = (arrays["working_bytes"] + there - freed).max(1, initial=room.ends.last_bytes)
        most_bytes: NDArray[np.float64] = np.maximum(most, room.ends.first_bytes - room.ends.behind_bytes - stay_bytes)
        return most_bytes


Key = tuple[float, float, int, tuple[int, ...]]  # seconds, bytes where too many, number of layers not kept, the choices


def choose(layers: Sequence[Load], room: Room, allowed: Sequence[str] = CHOICES) -> Choices:
    """Choose the fastest action for each layer that fits; among equals the one that offloads and recomputes least, and does so first.

    Few layers are searched exhaustively. For more, in several orders of the layers (as they come, and by seconds to recompute per byte
    freed) every number of the first is offloaded and the fewest after them that fit are recomputed; of equal layers no other choice is
    better, and a first and a last one that differ change little. Where more differ, local search then changes one or two at a time.

    Raises:
        Infeasible: nothing fits, with the bytes of the largest layer.

    >>> three = [Load(name, 1, 4, 0) for name in "abc"]
    >>> choose(three, Room(8, Seconds(3, 6), Copies(0.25, beside=True)))
    ('offload', 'keep', 'keep')
    """
    count = len(layers)
    stage = Stage(layers)
    codes = [FIRST.index(choice) for choice in allowed]

    def keys(tried: NDArray[np.int8]) -> list[Key]:
        need = stage.bytes(tried, room)
        fits = need <= room.limit_bytes * (1 + 1e-12)
        seconds = np.full(len(tried), inf)
        seconds[fits] = stage.seconds(tried[fits], room)
        # Rounded, since sums differ by rounding errors.
        changed = (tried != _KEEP).sum(1)
        return [
            (float(f"{step_s:.9g}"), 0.0 if fit else size, number, tuple(row))
            for step_s, fit, size, number, row in zip(*(column.tolist() for column in (seconds, fits, need, changed, tried)), strict=True)
        ]

    if count <= _EXACT:
        best = min(keys(np.array(list(product(codes, repeat=count)), dtype=np.int8)))
    else:
        candidates = [rows([(KEEP,) * count]), *(pair for order in _orders(layers) for pair in _along(stage, room, allowed, order))]
        starts = sorted(set(keys(np.concatenate(candidates))))
        layer_kinds = Counter((layer.forward_s, layer.saved_bytes, layer.entering_bytes, layer.collectives_s) for layer in layers)
        is_uniform = layer_kinds.most_common(1)[0][1] >= count - _ENDS and starts[0][0] < inf
        best = starts[0] if is_uniform else min(_improved(start, keys, codes) for start in starts[:4])
    if best[0] == inf:
        most = max(layer.saved_bytes for layer in layers)
        raise Infeasible(
            f"{count} layers do not fit in {format_bytes(room.limit_bytes)} whatever is offloaded or recomputed; the largest saves "
            f"{format_bytes(most)}: use more microbatches or stages, or allow more memory"
        )
    return tuple(FIRST[code] for code in best[-1])


def _orders(layers: Sequence[Load]) -> Iterator[list[int]]:
    """Yield orders in which the first layers are offloaded and those after them recomputed."""
    all_layers = list(range(len(layers)))
    yield all_layers
    yield all_layers[::-1]
    by_cost = sorted(all_layers, key=lambda i: -layers[i].forward_s / max(layers[i].saved_bytes, 1.0))
    yield by_cost
    yield by_cost[::-1]


def _along(stage: Stage, room: Room, allowed: Sequence[str], order: Sequence[int]) -> Iterator[NDArray[np.int8]]:
    """Yield, for every number of the order's first layers to offload, choices that recompute none of the others (which may need less memory
    than to recompute one) and as few as fit: the next ones, or the last."""
    count = len(order)
    for from_the_end in (False, True):
        num_recomputed = 0 if DROP not in allowed else count
        for num_offloaded in range(count + 1 if SWAP in allowed else 1):
            # The next layers, or the last ones in reverse order.
            queue = order[num_offloaded:][::-1] if from_the_end else order[num_offloaded:]
            tried = np.full((2, count), _KEEP, dtype=np.int8)
            tried[:, order[:num_offloaded]] = _SWAP
            tried[1, queue[:num_recomputed]] = _DROP
            num_recomputed = min(num_recomputed, len(queue))
            while num_recomputed:
                tried[1, queue[num_recomputed - 1]] = _KEEP
                if stage.bytes(tried[1:], room)[0] > room.limit_bytes:
                    tried[1, queue[num_recomputed - 1]] = _DROP
                    break
                num_recomputed -= 1
            yield tried


def _improved(start: Key, keys: Callable[[NDArray[np.int8]], list[Key]], codes: Sequence[int]) -> Key:
    """Improve a choice by changing one layer, or two of few, as long as that helps."""
    best, count = start, len(start[-1])
    sizes = (1, 2) if count <= _PAIRS else (1,)
    index_sets = [indices for size in sizes for indices in combinations(range(count), size)]
    while True:
        tried = []
        for indices in index_sets:
            for new in product(codes, repeat=len(indices)):
                row = list(best[-1])
                for index, code in zip(indices, new, strict=True):
                    row[index] = code
                tried.append(row)
        lowest = min(keys(np.array(tried, dtype=np.int8)))
        if lowest >= best:
            return best
        best = lowest
