"""Choose the layers to offload and recompute of several stages on one rank, which share its memory.

Decided are the numbers of layers of every stage, from the prices' seconds and bytes and the microbatches of each stage in flight at every
moment (`weft.schedules.schedule`). Few combinations are searched exhaustively; of more, a greedy search makes the change that frees most
bytes for its seconds until it fits, then undoes what there is memory for after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from weft.cost.stages.stage import StageCost
from weft.errors import Infeasible
from weft.schedules import Held
from weft.units import format_bytes

_EXACT = 4096  # combinations, at most, for an exhaustive search
_STEPS = 8  # numbers of layers of one stage that are tried, at most, besides none

Floats = NDArray[np.float64]
Counts = tuple[int, int]  # layers of a stage to offload, the first ones, and to recompute, the next


def numbers(layers: int, moves: bool, repeats: bool) -> list[Counts]:
    """Return the pairs of numbers to try for a stage of so many layers, none first.

    >>> numbers(2, False, True)
    [(0, 0), (0, 1), (0, 2)]
    """
    tried = sorted({0, layers, *range(0, layers, max(1, -(-layers // _STEPS)))})
    return [(k, d) for k in (tried if moves else [0]) for d in (tried if repeats else [0]) if k + d <= layers]


@dataclass(frozen=True)
class Ways:
    """Options for one stage's layers: `counts`, and for each option its seconds and bytes as `StageCost` has them."""

    counts: Sequence[Counts]
    seconds: Floats
    activations: Floats
    there: Floats  # of the microbatch in backward
    noted: Floats  # of each microbatch whose weight gradients are deferred

    @classmethod
    def of(cls, counts: Sequence[Counts], costs: Sequence[StageCost]) -> Ways:
        """`costs`: of the stage, one for each of `counts`."""
        memories = [cost.memory for cost in costs]
        return cls(
            counts,
            np.array([cost.forward_s + cost.backward_s for cost in costs]),
            np.array([memory.kept_bytes for memory in memories]),
            np.array([memory.there_bytes + memory.beside_bytes for memory in memories]),
            np.array([memory.noted_bytes for memory in memories]),
        )


@dataclass(frozen=True, eq=False)
class Several:
    """Stages of one rank, and their microbatches by moment. `transient_bytes`: by moment, bytes that are the same for every choice."""

    ways: Sequence[Ways]
    now: Held
    besides: Floats

    def choose(self, limit_bytes: float) -> list[Counts]:
        """Return the fastest numbers that fit; of equals those that offload and recompute least.

        Raises:
            Infeasible: nothing fits.
        """
        limit = limit_bytes * (1 + 1e-12)
        is_small = prod(len(stage.counts) for stage in self.ways) <= _EXACT
        chosen = self._all(limit) if is_small else self._undone(self._freed(limit), limit)
        return [stage.counts[i] for stage, i in zip(self.ways, chosen, strict=True)]

    def bytes(self, chosen: Sequence[int]) -> Floats:
        """Bytes by moment, of one option of each stage."""
        return self._bytes(*self._held(chosen))

    def _bytes(self, activations: Floats, there: Floats, noted: Floats) -> Floats:
        """Bytes by moment; of many combinations, in rows of the arguments, by moment and combination."""
        amounts: Floats = self.now.in_flight @ activations.T + self.now.backward @ there.T + self.now.noted @ noted.T
        return amounts + (self.besides if activations.ndim == 1 else self.besides[:, None])

    def _held(self, chosen: Sequence[int]) -> tuple[Floats, Floats, Floats]:
        pairs = list(zip(self.ways, chosen, strict=True))
        saved, deferred = np.array([stage.activations[i] for stage, i in pairs]), np.array([stage.noted[i] for stage, i in pairs])
        return saved, np.array([stage.there[i] for stage, i in pairs]), deferred

    def _all(self, limit: float) -> list[int]:
        combinations = np.array(list(product(*(range(len(stage.counts)) for stage in self.ways))), dtype=np.intp)

        def by_combination(by_stage: Sequence[Floats]) -> Floats:
            return np.stack([amount[combinations[:, s]] for s, amount in enumerate(by_stage)], axis=1)

        seconds = by_combination([stage.seconds for stage in self.ways])
        amounts = ([stage.activations for stage in self.ways], [stage.there for stage in self.ways], [stage.noted for stage in self.ways])
        fits = self._bytes(by_combination(amounts[0]), by_combination(amounts[1]), by_combination(amounts[2])).max(axis=0) <= limit
        if not fits.any():
            raise self._nothing(limit)
        changed = by_combination([np.array([sum(c) for c in stage.counts]) for stage in self.ways]).sum(1)
        total = np.where(fits, seconds.sum(1), np.inf)
        least = np.flatnonzero(total <= total.min() * (1 + 1e-9))
        return [int(i) for i in combinations[least[changed[least].argmin()]]]

    def _freed(self, limit: float) -> list[int]:
        """Starting from no offload or recompute, change one stage at a time where a byte takes fewest seconds, until it fits."""
        chosen = [0] * len(self.ways)
        for _ in range(sum(len(ways.counts) for ways in self.ways)):
            by_moment = self.bytes(chosen)
            at = int(by_moment.argmax())
            if by_moment[at] <= limit:
                return chosen
            best: tuple[float, float, int, int] | None = None
            for s, (ways, i) in enumerate(zip(self.ways, chosen, strict=True)):
                live = self.now
                amounts = live.in_flight[at, s] * ways.activations + live.backward[at, s] * ways.there + live.noted[at, s] * ways.noted
                freed, added_s = amounts[i] - amounts, np.maximum(0.0, ways.seconds - ways.seconds[i])
                rate = np.where(freed > 0, added_s / np.maximum(freed, 1e-9), np.inf)
                target = int(np.lexsort((freed, rate))[0])
                if rate[target] < np.inf and (best is None or (float(rate[target]), float(freed[target])) < best[:2]):
                    best = float(rate[target]), float(freed[target]), s, target
            if best is None:
                break
            chosen[best[2]] = best[3]
        raise self._nothing(limit)

    def _undone(self, chosen: list[int], limit: float) -> list[int]:
        """Undo what saves most seconds while it still fits."""
        while True:
            best: tuple[float, int, int] | None = None
            for s, stage in enumerate(self.ways):
                saved = stage.seconds[chosen[s]] - stage.seconds
                for i in np.argsort(-saved, kind="stable").tolist():
                    if saved[i] <= 1e-12 * stage.seconds[chosen[s]] or (best is not None and saved[i] <= best[0]):
                        break
                    if self.bytes([*chosen[:s], i, *chosen[s + 1 :]]).max() <= limit:
                        best = float(saved[i]), s, i
                        break
            if best is None:
                return chosen
            chosen[best[1]] = best[2]

    def _nothing(self, limit: float) -> Infeasible:
        return Infeasible(f"{len(self.ways)} stages do not fit in {format_bytes(limit)}, whatever layers are offloaded or recomputed")
