"""What to keep, move and repeat of the layers of several stages on one rank, which share its memory.

In: of every stage the numbers of layers that may be moved and repeated, with the prices' seconds and bytes, and how many microbatches of it
there are when (`weft.schedules.schedule`). Out: the numbers for every stage. Few combinations are all tried; of more, the change that
frees most bytes for its seconds is made until it fits, then what there is room for after all is undone.
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

_EXACT = 4096  # combinations up to which all are tried
_STEPS = 8  # numbers of layers of one stage that are tried, at most, beside none: of more layers not every number is

Floats = NDArray[np.float64]
Counts = tuple[int, int]  # layers of a stage that are moved, the first ones, and that are repeated, the next


def numbers(layers: int, moves: bool, repeats: bool) -> list[Counts]:
    """The numbers that are tried of a stage of so many layers, none first.

    >>> numbers(2, False, True)
    [(0, 0), (0, 1), (0, 2)]
    """
    some = sorted({0, layers, *range(0, layers, max(1, -(-layers // _STEPS)))})
    return [(k, d) for k in (some if moves else [0]) for d in (some if repeats else [0]) if k + d <= layers]


@dataclass(frozen=True)
class Ways:
    """What may become of one stage's layers: `counts`, and by number what they take and hold as `StageCost` says it."""

    counts: Sequence[Counts]
    seconds: Floats
    activations: Floats
    there: Floats  # of the microbatch that goes backward
    noted: Floats  # of each whose weights part is put off

    @classmethod
    def of(cls, counts: Sequence[Counts], costs: Sequence[StageCost]) -> Ways:
        """`costs`: of the stage, one for each of `counts`."""
        held = [cost.memory for cost in costs]
        return cls(
            counts,
            np.array([cost.forward_s + cost.backward_s for cost in costs]),
            np.array([one.kept_bytes for one in held]),
            np.array([one.there_bytes + one.beside_bytes for one in held]),
            np.array([one.noted_bytes for one in held]),
        )


@dataclass(frozen=True, eq=False)
class Several:
    """The stages of one rank, and what it holds of them by moment. `besides`: by moment, bytes that come and go whatever is chosen."""

    ways: Sequence[Ways]
    now: Held
    besides: Floats

    def choose(self, limit_bytes: float) -> list[Counts]:
        """The fastest numbers that fit; of equals those that move and repeat least.

        Raises:
            Infeasible: nothing fits.
        """
        limit = limit_bytes * (1 + 1e-12)
        few = prod(len(one.counts) for one in self.ways) <= _EXACT
        chosen = self._all(limit) if few else self._undone(self._freed(limit), limit)
        return [one.counts[i] for one, i in zip(self.ways, chosen, strict=True)]

    def bytes(self, chosen: Sequence[int]) -> Floats:
        """By moment, of one way of each stage."""
        return self._bytes(*self._held(chosen))

    def _bytes(self, activations: Floats, there: Floats, noted: Floats) -> Floats:
        """By moment; of many combinations, rows of what is held, by moment and combination."""
        amounts: Floats = self.now.in_flight @ activations.T + self.now.backward @ there.T + self.now.noted @ noted.T
        return amounts + (self.besides if activations.ndim == 1 else self.besides[:, None])

    def _held(self, chosen: Sequence[int]) -> tuple[Floats, Floats, Floats]:
        ways = list(zip(self.ways, chosen, strict=True))
        activations, there, noted = (np.array([getattr(one, part)[i] for one, i in ways]) for part in ("activations", "there", "noted"))
        return activations, there, noted

    def _all(self, limit: float) -> list[int]:
        every = np.array(list(product(*(range(len(one.counts)) for one in self.ways))), dtype=np.intp)
        seconds, activations, there, noted = (
            np.stack([getattr(one, part)[every[:, s]] for s, one in enumerate(self.ways)], axis=1)
            for part in ("seconds", "activations", "there", "noted")
        )
        fits = self._bytes(activations, there, noted).max(axis=0) <= limit
        if not fits.any():
            raise self._nothing(limit)
        changed = np.stack([np.array([sum(c) for c in one.counts])[every[:, s]] for s, one in enumerate(self.ways)], axis=1).sum(1)
        total = np.where(fits, seconds.sum(1), np.inf)
        least = np.flatnonzero(total <= total.min() * (1 + 1e-9))
        return [int(i) for i in every[least[changed[least].argmin()]]]

    def _freed(self, limit: float) -> list[int]:
        """From what keeps all, one stage's layers after another's, where a byte takes fewest seconds, until it fits."""
        chosen = [0] * len(self.ways)
        for _ in range(sum(len(one.counts) for one in self.ways)):
            by_moment = self.bytes(chosen)
            at = int(by_moment.argmax())
            if by_moment[at] <= limit:
                return chosen
            best: tuple[float, float, int, int] | None = None
            for s, (one, i) in enumerate(zip(self.ways, chosen, strict=True)):
                held = (
                    self.now.in_flight[at, s] * one.activations + self.now.backward[at, s] * one.there + self.now.noted[at, s] * one.noted
                )
                freed, more = held[i] - held, np.maximum(0.0, one.seconds - one.seconds[i])
                rate = np.where(freed > 0, more / np.maximum(freed, 1e-9), np.inf)
                to = int(np.lexsort((freed, rate))[0])
                if rate[to] < np.inf and (best is None or (float(rate[to]), float(freed[to])) < best[:2]):
                    best = float(rate[to]), float(freed[to]), s, to
            if best is None:
                break
            chosen[best[2]] = best[3]
        raise self._nothing(limit)

    def _undone(self, chosen: list[int], limit: float) -> list[int]:
        """The same with what saves most seconds undone while it still fits."""
        while True:
            best: tuple[float, int, int] | None = None
            for s, one in enumerate(self.ways):
                saved = one.seconds[chosen[s]] - one.seconds
                for i in np.argsort(-saved, kind="stable").tolist():
                    if saved[i] <= 1e-12 * one.seconds[chosen[s]] or (best is not None and saved[i] <= best[0]):
                        break
                    if self.bytes([*chosen[:s], i, *chosen[s + 1 :]]).max() <= limit:
                        best = float(saved[i]), s, i
                        break
            if best is None:
                return chosen
            chosen[best[1]] = best[2]

    def _nothing(self, limit: float) -> Infeasible:
        return Infeasible(f"{len(self.ways)} stages do not fit in {format_bytes(limit)} whatever of their layers is moved or repeated")
