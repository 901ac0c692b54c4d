"""Choose which layers keep their activations on the device, which offload them and which recompute them (KARMA: Wahib et al., SC 2020).

`choose_layers` decides for the layers of one stage, `shardwise.solve.shared_rank_memory` for several stages on one rank, in a model of
bytes and
seconds that equals that of `memory_of` and `HostCopies`; `shardwise.solve.activation_memory` checks the result against the prices.
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

from shardwise.cost.devices.compute import Seconds
from shardwise.cost.devices.devices import HostCopies
from shardwise.cost.stages.base import NO_UNLAYERED_COST, LayerCost, UnlayeredCost
from shardwise.errors import Infeasible
from shardwise.units import format_bytes

KEEP, OFFLOAD, RECOMPUTE = "keep", "offload", "recompute"
ALL_CHOICES = (KEEP, OFFLOAD, RECOMPUTE)
PREFERENCE_ORDER = (OFFLOAD, RECOMPUTE, KEEP)  # of equal choices, offload the first layers, recompute the next, keep the last
_OFFLOAD_CODE, _RECOMPUTE_CODE, _KEEP_CODE = range(len(PREFERENCE_ORDER))
_MAX_EXHAUSTIVE_LAYERS = 5  # layers, at most, for which every choice is tried
_MAX_PAIRWISE_LAYERS = 12  # layers, at most, for which two are changed at a time
_MAX_DIFFERING_LAYERS = 2  # layers that may differ from the others: a stage's first and last

ChoicePerLayer = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory and time of a stage's layers: `limit_bytes` for saved tensors and workspaces, of `num_in_flight` microbatches at once.

    `compute`: seconds of the stage without copies. `unlayered`: cost of what is before and after the layers. `num_loaded_layers`:
    offloaded layers that are on the device at once, the one in backward and those being loaded.
    """

    limit_bytes: float
    compute: Seconds
    copies: HostCopies
    num_in_flight: float = 1.0
    unlayered: UnlayeredCost = NO_UNLAYERED_COST
    num_loaded_layers: int = 1


def encode_choices(every: Iterable[Sequence[str]]) -> NDArray[np.int8]:
    """Encode choices as `StageLayers` evaluates them."""
    return np.array([[PREFERENCE_ORDER.index(choice) for choice in choices] for choices in every], dtype=np.int8)


@dataclass(frozen=True, eq=False)
class StageLayers:
    """Layers of a stage as arrays, so that many choices are evaluated at once.

    Rows of `tried` (`encode_choices`) are choices as indices into `PREFERENCE_ORDER`, its columns layers.

    >>> two, room = StageLayers([LayerCost("a", 1, 4, 1), LayerCost("b", 1, 4, 1)]), MemoryBudget(8, Seconds(2, 4), HostCopies(0.25, overlap_compute=False))
    >>> tried = encode_choices([(KEEP, KEEP), (OFFLOAD, KEEP), (RECOMPUTE, KEEP), (RECOMPUTE, RECOMPUTE)])
    >>> two.seconds(tried, room), two.peak_bytes(tried, room)
    (array([6., 8., 7., 8.]), array([8., 4., 5., 5.]))
    """  # noqa: E501

    layers: Sequence[LayerCost]

    @cached_property
    def _arrays(self) -> dict[str, NDArray[np.float64]]:
        names = ("forward_s", "saved_bytes", "entering_bytes", "collectives_s", "working_bytes")
        arrays = {name: np.array([getattr(layer, name) for layer in self.layers], dtype=np.float64) for name in names}
        back = [layer.saved_bytes if layer.loaded_bytes is None else layer.loaded_bytes for layer in self.layers]
        return arrays | {"back_bytes": np.array(back, dtype=np.float64)}

    def seconds(self, tried: NDArray[np.int8], budget: MemoryBudget) -> NDArray[np.float64]:
        """Seconds of one microbatch, forward and backward, of every choice."""
        arrays = self._arrays
        offloaded_bytes = np.where(tried == _OFFLOAD_CODE, arrays["saved_bytes"], 0.0).sum(1)
        recompute_s = np.where(tried == _RECOMPUTE_CODE, arrays["forward_s"], 0.0).sum(1)
        collectives = np.where(tried == _RECOMPUTE_CODE, arrays["collectives_s"], 0.0).sum(1)
        compute = [budget.compute + Seconds(0.0, float(added_s)) for added_s in recompute_s]
        computes = [budget.copies.with_copies(c, float(size)) if size else c for c, size in zip(compute, offloaded_bytes, strict=True)]
        seconds: NDArray[np.float64] = np.array([c.total for c in computes]) + collectives
        return seconds

    def peak_bytes(self, tried: NDArray[np.int8], budget: MemoryBudget) -> NDArray[np.float64]:
        """Bytes on the device at the peak: in the backward of one layer, when the saved tensors of later layers are freed."""
        return self.saved_bytes(tried) * budget.num_in_flight + self.backward_bytes(tried, budget)

    def saved_bytes(self, tried: NDArray[np.int8]) -> NDArray[np.float64]:
        """Bytes of one microbatch that stay on the device until its backward."""
        amounts: NDArray[np.float64] = self._saved_by_layer(tried).sum(1)
        return amounts

    def _saved_by_layer(self, tried: NDArray[np.int8]) -> NDArray[np.float64]:
        saved, entering = self._arrays["saved_bytes"], self._arrays["entering_bytes"]
        return np.where(tried == _OFFLOAD_CODE, 0.0, np.where(tried == _RECOMPUTE_CODE, entering, saved))

    def backward_bytes(self, tried: NDArray[np.int8], budget: MemoryBudget) -> NDArray[np.float64]:
        """Further bytes, of the microbatch in backward: at the layer that needs most, less what is freed by then."""
        arrays = self._arrays
        saved, entering = arrays["saved_bytes"], arrays["entering_bytes"]
        is_offloaded, is_recomputed = tried == _OFFLOAD_CODE, tried == _RECOMPUTE_CODE
        largest = np.where(is_offloaded, saved, 0.0).max(1, initial=0.0)[:, None]
        stays = self._saved_by_layer(tried)
        recomputed = np.where(is_recomputed, np.maximum(0.0, saved - entering), 0.0)
        there = np.where(is_offloaded, arrays["back_bytes"] + (budget.num_loaded_layers - 1) * largest, recomputed)
        saved_from = stays[:, ::-1].cumsum(1)[:, ::-1]  # of each layer and the later ones
        freed = budget.unlayered.saved_after_bytes + saved_from - stays
        stay_bytes = stays.sum(1)
        most = (arrays["working_bytes"] + there - freed).max(1, initial=budget.unlayered.last_bytes)
        most_bytes: NDArray[np.float64] = np.maximum(most, budget.unlayered.first_bytes - budget.unlayered.saved_after_bytes - stay_bytes)
        return most_bytes


ChoiceKey = tuple[float, float, int, tuple[int, ...]]  # seconds, bytes where too many, number of layers not kept, the choices


def choose_layers(layers: Sequence[LayerCost], budget: MemoryBudget, allowed: Sequence[str] = ALL_CHOICES) -> ChoicePerLayer:
    """Choose the fastest action for each layer that fits; among equals the one that offloads and recomputes least, and does so first.

    Few layers are searched exhaustively. For more, in several orders of the layers (as they come, and by seconds to recompute per byte
    freed) every number of the first is offloaded and the fewest after them that fit are recomputed; of equal layers no other choice is
    better, and a first and a last one that differ change little. Where more differ, local search then changes one or two at a time.

    Raises:
        Infeasible: nothing fits, with the bytes of the largest layer.

    >>> three = [LayerCost(name, 1, 4, 0) for name in "abc"]
    >>> choose_layers(three, MemoryBudget(8, Seconds(3, 6), HostCopies(0.25, overlap_compute=True)))
    ('offload', 'keep', 'keep')
    """
    count = len(layers)
    stage = StageLayers(layers)
    codes = [PREFERENCE_ORDER.index(choice) for choice in allowed]

    def keys(tried: NDArray[np.int8]) -> list[ChoiceKey]:
        need = stage.peak_bytes(tried, budget)
        fits = need <= budget.limit_bytes * (1 + 1e-12)
        seconds = np.full(len(tried), inf)
        seconds[fits] = stage.seconds(tried[fits], budget)
        # Rounded, since sums differ by rounding errors.
        changed = (tried != _KEEP_CODE).sum(1)
        return [
            (float(f"{step_s:.9g}"), 0.0 if fit else size, number, tuple(row))
            for step_s, fit, size, number, row in zip(*(column.tolist() for column in (seconds, fits, need, changed, tried)), strict=True)
        ]

    if count <= _MAX_EXHAUSTIVE_LAYERS:
        best = min(keys(np.array(list(product(codes, repeat=count)), dtype=np.int8)))
    else:
        candidates = [
            encode_choices([(KEEP,) * count]),
            *(pair for order in _layer_orders(layers) for pair in _candidates_along(stage, budget, allowed, order)),
        ]
        starts = sorted(set(keys(np.concatenate(candidates))))
        layer_kinds = Counter((layer.forward_s, layer.saved_bytes, layer.entering_bytes, layer.collectives_s) for layer in layers)
        is_uniform = layer_kinds.most_common(1)[0][1] >= count - _MAX_DIFFERING_LAYERS and starts[0][0] < inf
        best = starts[0] if is_uniform else min(_improve_locally(start, keys, codes) for start in starts[:4])
    if best[0] == inf:
        most = max(layer.saved_bytes for layer in layers)
        raise Infeasible(
            f"{count} layers do not fit in {format_bytes(budget.limit_bytes)} whatever is offloaded or recomputed; the largest saves "
            f"{format_bytes(most)}: use more microbatches or stages, or allow more memory"
        )
    return tuple(PREFERENCE_ORDER[code] for code in best[-1])


def _layer_orders(layers: Sequence[LayerCost]) -> Iterator[list[int]]:
    """Yield orders in which the first layers are offloaded and those after them recomputed."""
    all_layers = list(range(len(layers)))
    yield all_layers
    yield all_layers[::-1]
    by_cost = sorted(all_layers, key=lambda i: -layers[i].forward_s / max(layers[i].saved_bytes, 1.0))
    yield by_cost
    yield by_cost[::-1]


def _candidates_along(stage: StageLayers, budget: MemoryBudget, allowed: Sequence[str], order: Sequence[int]) -> Iterator[NDArray[np.int8]]:
    """Yield, for every number of the order's first layers to offload, choices that recompute none of the others (which may need less memory
    than to recompute one) and as few as fit: the next ones, or the last."""
    count = len(order)
    for from_the_end in (False, True):
        num_recomputed = 0 if RECOMPUTE not in allowed else count
        for num_offloaded in range(count + 1 if OFFLOAD in allowed else 1):
            # The next layers, or the last ones in reverse order.
            queue = order[num_offloaded:][::-1] if from_the_end else order[num_offloaded:]
            tried = np.full((2, count), _KEEP_CODE, dtype=np.int8)
            tried[:, order[:num_offloaded]] = _OFFLOAD_CODE
            tried[1, queue[:num_recomputed]] = _RECOMPUTE_CODE
            num_recomputed = min(num_recomputed, len(queue))
            while num_recomputed:
                tried[1, queue[num_recomputed - 1]] = _KEEP_CODE
                if stage.peak_bytes(tried[1:], budget)[0] > budget.limit_bytes:
                    tried[1, queue[num_recomputed - 1]] = _RECOMPUTE_CODE
                    break
                num_recomputed -= 1
            yield tried


def _improve_locally(start: ChoiceKey, keys: Callable[[NDArray[np.int8]], list[ChoiceKey]], choice_codes: Sequence[int]) -> ChoiceKey:
    """Improve a choice by changing one layer, or two of few, as long as that helps."""
    best, count = start, len(start[-1])
    sizes = (1, 2) if count <= _MAX_PAIRWISE_LAYERS else (1,)
    index_sets = [indices for size in sizes for indices in combinations(range(count), size)]
    while True:
        tried = []
        for indices in index_sets:
            for new in product(choice_codes, repeat=len(indices)):
                row = list(best[-1])
                for index, code in zip(indices, new, strict=True):
                    row[index] = code
                tried.append(row)
        lowest = min(keys(np.array(tried, dtype=np.int8)))
        if lowest >= best:
            return best
        best = lowest
