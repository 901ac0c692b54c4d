"""Which stages' activations stay on the device, which go to the host, which are made again (KARMA: Wahib et al., SC 2020).

In: seconds and bytes of each stage of one rank, the bytes that the device has for them, the speed of copies. Out: `Residency`. Swapping
costs nothing while copies hide behind the compute of other stages, recomputation costs its forward; a copy that does not hide, or that
must leave before the next forward fits, makes the compute wait. `seconds_of` is that clock; `choose` looks for the fastest.

Not modelled: more than one load ahead, copies that slow the compute down, and microbatches that overlap (they run one after the other).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import inf

from weft.cost.stage import StageCost
from weft.errors import Infeasible
from weft.plan.program import Links, Program
from weft.schedules.out_of_core import out_of_core
from weft.units import format_bytes

KEEP, SWAP, DROP = "keep", "swap", "drop"
CHOICES = (KEEP, SWAP, DROP)
_EXACT = 5  # stages up to which every choice is tried


@dataclass(frozen=True, slots=True)
class Load:
    """One stage of one microbatch: seconds, bytes that it saves for backward, and bytes that enter it, which outlive a drop."""

    forward_s: float
    backward_s: float
    saved_bytes: float
    input_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Residency:
    """`choices[stage]`, and the seconds of one microbatch."""

    choices: tuple[str, ...]
    seconds: float

    def of(self, choice: str) -> frozenset[int]:
        """The stages with this choice."""
        return frozenset(s for s, one in enumerate(self.choices) if one == choice)

    def program(self, num_microbatches: int, links: Links | None = None) -> Program:
        """The program of one rank that does so."""
        return out_of_core(len(self.choices), num_microbatches, links, self.of(SWAP), self.of(DROP))


def seconds_of(loads: Sequence[Load], choices: Sequence[str], limit_bytes: float, bytes_per_s: float, overlaps: bool = True) -> float:
    """Seconds of all forwards and backwards; infinite where they never fit. Without `overlaps` copies take the compute's time.

    >>> seconds_of([Load(1, 2, 4), Load(1, 2, 4)], ("swap", "keep"), 8, 4.0)
    6.0
    >>> seconds_of([Load(1, 2, 4), Load(1, 2, 4)], ("drop", "keep"), 4, 4.0)
    7.0
    """
    clock = _Clock(limit_bytes, bytes_per_s, overlaps)
    last = len(loads) - 1
    # The last stage's backward follows its forward at once, so that there is nothing to gain from letting go of it.
    plan = [KEEP if s == last else choice for s, choice in enumerate(choices)]
    for load, choice in zip(loads, plan, strict=True):
        if not clock.fits(load.saved_bytes if choice != DROP else load.input_bytes):
            return inf
        clock.now += load.forward_s
        clock.held += load.saved_bytes if choice != DROP else load.input_bytes
        if choice == SWAP:
            clock.copy_out(load.saved_bytes)
        else:
            clock.left.append(None)
    arrives: float | None = None
    for s in reversed(range(len(loads))):
        load, choice = loads[s], plan[s]
        if choice == DROP:
            if not clock.fits(load.saved_bytes - load.input_bytes):
                return inf
            clock.held += load.saved_bytes - load.input_bytes
            clock.now += load.forward_s
        elif choice == SWAP:
            if arrives is None:  # there was no room for it before
                if not clock.fits(load.saved_bytes):
                    return inf
                arrives = clock.copy_in(load.saved_bytes, s)
            clock.now = max(clock.now, arrives)
        arrives = None
        if s and plan[s - 1] == SWAP and clock.room(loads[s - 1].saved_bytes):
            arrives = clock.copy_in(loads[s - 1].saved_bytes, s - 1)
        clock.now += load.backward_s
        clock.held -= load.saved_bytes
    return clock.now


class _Clock:
    """Compute, a lane for copies in each direction, and the memory between them."""

    def __init__(self, limit_bytes: float, bytes_per_s: float, overlaps: bool) -> None:
        self.now = self.held = self._out = self._in = 0.0
        self.left: list[float | None] = []  # by stage: when its copy has left the device
        self._leaving: list[tuple[float, float]] = []
        self._limit, self._speed, self._overlaps = limit_bytes * (1 + 1e-12), bytes_per_s, overlaps

    def room(self, size: float) -> bool:
        """Whether there is room now."""
        while self._leaving and self._leaving[0][0] <= self.now:
            self.held -= self._leaving.pop(0)[1]
        return self.held + size <= self._limit

    def fits(self, size: float) -> bool:
        """Wait until there is room; False where there never is."""
        while not self.room(size):
            if not self._leaving:
                return False
            self.now = self._leaving[0][0]
        return True

    def copy_out(self, size: float) -> None:
        """To the host, from now on."""
        if not self._overlaps:
            self.now += size / self._speed
        self._out = max(self.now, self._out) + (size / self._speed if self._overlaps else 0.0)
        self._leaving.append((self._out, size))
        self.left.append(self._out)

    def copy_in(self, size: float, stage: int) -> float:
        """Back to the device; when it has arrived."""
        self.held += size
        if not self._overlaps:
            self.now += size / self._speed
            return self.now
        self._in = max(self.now, self._in, self.left[stage] or 0.0) + size / self._speed
        return self._in


def choose(loads: Sequence[Load], limit_bytes: float, bytes_per_s: float, overlaps: bool = True) -> Residency:
    """The fastest choice that fits; of equals the one that moves and repeats least.

    Every choice is tried for few stages. For more the search starts from the shapes that KARMA has (the first stages swapped, those
    after them dropped, the rest kept) and changes one or two stages at a time while that helps.

    Raises:
        Infeasible: nothing fits, with the bytes of the largest stage.

    >>> choose([Load(1, 2, 4), Load(1, 2, 4), Load(1, 2, 4)], 8, 4.0).choices
    ('swap', 'keep', 'keep')
    """
    count = len(loads)

    def key(choices: tuple[str, ...]) -> tuple[float, int]:
        return seconds_of(loads, choices, limit_bytes, bytes_per_s, overlaps), sum(one != KEEP for one in choices)

    if count <= _EXACT:
        best = min(product(CHOICES, repeat=count), key=key)
    else:
        starts = [(SWAP,) * i + (DROP,) * (j - i) + (KEEP,) * (count - j) for i, j in combinations(range(count + 1), 2)]
        starts += [(DROP,) * i + (SWAP,) * (j - i) + (KEEP,) * (count - j) for i, j in combinations(range(count + 1), 2)]
        starts.append((KEEP,) * count)
        best = min((_improved(start, key) for start in sorted(set(starts), key=key)[:4]), key=key)
    seconds = key(best)[0]
    if seconds == inf:
        most = max(load.saved_bytes for load in loads)
        raise Infeasible(
            f"{count} stages do not fit in {format_bytes(limit_bytes)} whatever is swapped or dropped; the largest saves "
            f"{format_bytes(most)}: use more chunks, more microbatches, or allow more memory"
        )
    return Residency(best, seconds)


def _improved(start: tuple[str, ...], key: object) -> tuple[str, ...]:
    assert callable(key)
    best, value = start, key(start)
    while True:
        found = best
        for places in (*combinations(range(len(best)), 1), *combinations(range(len(best)), 2)):
            for new in product(CHOICES, repeat=len(places)):
                tried = list(best)
                for place, one in zip(places, new, strict=True):
                    tried[place] = one
                if (better := key(tuple(tried))) < value:
                    found, value = tuple(tried), better
        if found == best:
            return best
        best = found


def loads_of(costs: Sequence[StageCost]) -> tuple[Load, ...]:
    """The stages of one rank as the cost model has them."""
    return tuple(Load(c.forward_s, c.backward_s, c.memory.activations) for c in costs)


def state_of(costs: Sequence[StageCost]) -> float:
    """Bytes that are there all the time: parameters, gradients, optimizer, and the most that one stage works on."""
    held = sum(c.memory.parameters + c.memory.gradients + c.memory.optimizer for c in costs)
    return held + max(c.memory.buffers for c in costs)
