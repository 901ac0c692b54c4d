"""Choose the layers to offload and recompute of several stages on one rank, which share its memory.

Decided are the numbers of layers of every stage, from the prices' seconds and bytes and the microbatches of each stage in flight at every
moment (`shardwise.schedules.schedule`). Few combinations are searched exhaustively; of more, a greedy search makes the change that frees
most
bytes for its seconds until it fits, then undoes what there is memory for after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.stages.stage import StageCost
from shardwise.errors import Infeasible
from shardwise.schedules import LiveMicrobatches
from shardwise.units import format_bytes

_MAX_COMBINATIONS = 4096  # combinations, at most, for an exhaustive search
_MAX_COUNTS = 8  # numbers of layers of one stage that are tried, at most, besides none

Floats = NDArray[np.float64]
LayerCounts = tuple[int, int]  # layers of a stage to offload, the first ones, and to recompute, the next


def layer_count_options(num_layers: int, may_offload: bool, may_recompute: bool) -> list[LayerCounts]:
    """Return the pairs of numbers to try for a stage of so many layers, none first.

    >>> layer_count_options(2, False, True)
    [(0, 0), (0, 1), (0, 2)]
    """
    tried = sorted({0, num_layers, *range(0, num_layers, max(1, -(-num_layers // _MAX_COUNTS)))})
    return [(k, d) for k in (tried if may_offload else [0]) for d in (tried if may_recompute else [0]) if k + d <= num_layers]


@dataclass(frozen=True)
class StageOptions:
    """Options for one stage's layers: `counts`, and for each option its seconds and bytes as `StageCost` has them."""

    counts: Sequence[LayerCounts]
    seconds: Floats
    saved_bytes: Floats
    backward_bytes: Floats  # of the microbatch in backward
    deferred_bytes: Floats  # of each microbatch whose weight gradients are deferred

    @classmethod
    def from_costs(cls, counts: Sequence[LayerCounts], costs: Sequence[StageCost]) -> StageOptions:
        """`costs`: of the stage, one for each of `counts`."""
        memories = [cost.memory for cost in costs]
        return cls(
            counts,
            np.array([cost.forward_s + cost.backward_s for cost in costs]),
            np.array([memory.saved_bytes for memory in memories]),
            np.array([memory.rematerialized_bytes + memory.transient_bytes for memory in memories]),
            np.array([memory.deferred_bytes for memory in memories]),
        )


@dataclass(frozen=True, eq=False)
class SharedRankMemory:
    """Stages of one rank, and their microbatches by moment. `transient_bytes`: by moment, bytes that are the same for every choice."""

    options: Sequence[StageOptions]
    live: LiveMicrobatches
    transient_bytes: Floats

    def choose(self, limit_bytes: float) -> list[LayerCounts]:
        """Return the fastest numbers that fit; of equals those that offload and recompute least.

        Raises:
            Infeasible: nothing fits.
        """
        limit = limit_bytes * (1 + 1e-12)
        is_small = prod(len(stage.counts) for stage in self.options) <= _MAX_COMBINATIONS
        chosen = self._search_all(limit) if is_small else self._restore_greedily(self._free_greedily(limit), limit)
        return [stage.counts[i] for stage, i in zip(self.options, chosen, strict=True)]

    def bytes_by_moment(self, chosen: Sequence[int]) -> Floats:
        """Bytes by moment, of one option of each stage."""
        return self._combination_bytes(*self._stage_amounts(chosen))

    def _combination_bytes(self, saved_bytes: Floats, backward_bytes: Floats, deferred_bytes: Floats) -> Floats:
        """Bytes by moment; of many combinations, in rows of the arguments, by moment and combination."""
        amounts: Floats = (
            self.live.in_flight @ saved_bytes.T
            + self.live.backward @ backward_bytes.T
            + self.live.awaiting_weight_gradient @ deferred_bytes.T
        )
        return amounts + (self.transient_bytes if saved_bytes.ndim == 1 else self.transient_bytes[:, None])

    def _stage_amounts(self, chosen: Sequence[int]) -> tuple[Floats, Floats, Floats]:
        pairs = list(zip(self.options, chosen, strict=True))
        saved, deferred = np.array([stage.saved_bytes[i] for stage, i in pairs]), np.array([stage.deferred_bytes[i] for stage, i in pairs])
        return saved, np.array([stage.backward_bytes[i] for stage, i in pairs]), deferred

    def _search_all(self, limit: float) -> list[int]:
        combinations = np.array(list(product(*(range(len(stage.counts)) for stage in self.options))), dtype=np.intp)

        def by_combination(by_stage: Sequence[Floats]) -> Floats:
            return np.stack([amount[combinations[:, s]] for s, amount in enumerate(by_stage)], axis=1)

        seconds = by_combination([stage.seconds for stage in self.options])
        amounts = (
            [stage.saved_bytes for stage in self.options],
            [stage.backward_bytes for stage in self.options],
            [stage.deferred_bytes for stage in self.options],
        )
        fits = (
            self._combination_bytes(by_combination(amounts[0]), by_combination(amounts[1]), by_combination(amounts[2])).max(axis=0) <= limit
        )
        if not fits.any():
            raise self._infeasible(limit)
        changed = by_combination([np.array([sum(c) for c in stage.counts]) for stage in self.options]).sum(1)
        total = np.where(fits, seconds.sum(1), np.inf)
        least = np.flatnonzero(total <= total.min() * (1 + 1e-9))
        return [int(i) for i in combinations[least[changed[least].argmin()]]]

    def _free_greedily(self, limit: float) -> list[int]:
        """Starting from no offload or recompute, change one stage at a time where a byte takes fewest seconds, until it fits."""
        chosen = [0] * len(self.options)
        for _ in range(sum(len(ways.counts) for ways in self.options)):
            by_moment = self.bytes_by_moment(chosen)
            at = int(by_moment.argmax())
            if by_moment[at] <= limit:
                return chosen
            best: tuple[float, float, int, int] | None = None
            for s, (ways, i) in enumerate(zip(self.options, chosen, strict=True)):
                live = self.live
                amounts = (
                    live.in_flight[at, s] * ways.saved_bytes
                    + live.backward[at, s] * ways.backward_bytes
                    + live.awaiting_weight_gradient[at, s] * ways.deferred_bytes
                )
                freed, added_s = amounts[i] - amounts, np.maximum(0.0, ways.seconds - ways.seconds[i])
                rate = np.where(freed > 0, added_s / np.maximum(freed, 1e-9), np.inf)
                target = int(np.lexsort((freed, rate))[0])
                if rate[target] < np.inf and (best is None or (float(rate[target]), float(freed[target])) < best[:2]):
                    best = float(rate[target]), float(freed[target]), s, target
            if best is None:
                break
            chosen[best[2]] = best[3]
        raise self._infeasible(limit)

    def _restore_greedily(self, chosen: list[int], limit: float) -> list[int]:
        """Undo what saves most seconds while it still fits."""
        while True:
            best: tuple[float, int, int] | None = None
            for s, stage in enumerate(self.options):
                saved = stage.seconds[chosen[s]] - stage.seconds
                for i in np.argsort(-saved, kind="stable").tolist():
                    if saved[i] <= 1e-12 * stage.seconds[chosen[s]] or (best is not None and saved[i] <= best[0]):
                        break
                    if self.bytes_by_moment([*chosen[:s], i, *chosen[s + 1 :]]).max() <= limit:
                        best = float(saved[i]), s, i
                        break
            if best is None:
                return chosen
            chosen[best[1]] = best[2]

    def _infeasible(self, limit: float) -> Infeasible:
        return Infeasible(f"{len(self.options)} stages do not fit in {format_bytes(limit)}, whatever layers are offloaded or recomputed")
