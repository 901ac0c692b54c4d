"""Where pipeline stages begin. In: seconds of every unit between cuts, seconds to cross each cut. Out: the cuts to use.

Dynamic programming that makes the slowest stage as fast as it can be, a stage's time being its units' and the crossings at both
its ends; exact. Every stage may have seconds and limits of its own: its kind of device, its memory, and the microbatches that its
place in the schedule keeps in flight. Not modelled: what slower stages before or after a stage cost beside the slowest one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.errors import Infeasible

Matrix = NDArray[np.float64]


def balance(units_s: Sequence[float], crossings_s: Sequence[float], num_stages: int) -> tuple[tuple[int, ...], float]:
    """Split units into `num_stages` runs that minimise the slowest one.

    Args:
        units_s: seconds of each unit, n of them.
        crossings_s: seconds to cross between unit i and i + 1, n - 1 of them; counted for the stages on both sides.

    Returns:
        Indices of the first unit of every stage after the first, and the slowest stage's seconds.

    >>> balance([1, 1, 1, 3], [0, 0, 0], 2)
    ((3,), 3.0)

    Raises:
        Infeasible: fewer units than stages.
    """
    even = _even(units_s, crossings_s, num_stages)
    return even if even is not None else arrange([runs_s(units_s, crossings_s)] * num_stages)


def _even(units_s: Sequence[float], crossings_s: Sequence[float], num_stages: int) -> tuple[tuple[int, ...], float] | None:
    """`balance` where every border costs the same, in a hundredth of the time; None where it does not or greed needs fewer stages.

    Whether a limit can be met is found by filling stages from the last; the least limit by bisection. Of equal splits the one
    whose first stages are lightest comes out, which are those that keep most microbatches in flight.
    """
    n = len(units_s)
    if not 2 <= num_stages <= n or len(set(crossings_s)) != 1:
        return None
    cross = crossings_s[0]
    sums = [0.0, *np.cumsum(np.asarray(units_s, dtype=float)).tolist()]

    def filled(limit: float) -> list[int] | None:
        """Beginnings of the stages after the first, from the last; None where more stages are needed."""
        starts: list[int] = []
        end = n
        while True:
            room = limit - (cross if end < n else 0.0)
            if sums[end] <= room:
                return starts if len(starts) == num_stages - 1 else None
            if len(starts) == num_stages - 1:
                return []
            # At least as many units stay in front as stages are still to be filled.
            start = max(bisect_left(sums, sums[end] - (room - cross)), num_stages - 1 - len(starts))
            if start >= end:
                return []
            starts.append(start)
            end = start

    low, high = max(sums[n] / num_stages, max(units_s)), sums[n] + 2 * cross
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        if filled(middle) == []:
            low = middle
        else:
            high = middle
    starts = filled(high)
    if not starts:
        return None
    ends = [0, *reversed(starts), n]
    slowest = max(sums[b] - sums[a] + cross * ((a > 0) + (b < n)) for a, b in pairwise(ends))
    return tuple(ends[1:-1]), slowest


def runs_s(units_s: Sequence[float], crossings_s: Sequence[float], behind_s: Sequence[float] | None = None) -> Matrix:
    """Seconds of a stage of units i to j - 1, at [i, j] of n + 1 by n + 1, crossings at both its ends included; infinite where i >= j.
    `behind_s`: crossings at its end, where they are not those at its beginning."""
    n = len(units_s)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(units_s, dtype=float))])
    enter, leave = (np.array([0.0, *cross, 0.0]) for cross in (crossings_s, crossings_s if behind_s is None else behind_s))
    seconds: Matrix = before[None, :] - before[:, None] + leave[None, :] + enter[:, None]
    seconds[np.tri(n + 1, dtype=bool)] = np.inf
    return seconds


def runs_bytes(units: Sequence[float], peaks: Sequence[float] = ()) -> Matrix:
    """Bytes of a stage of units i to j - 1, at [i, j]: the sum of `units` and the largest of `peaks`; 0 where i >= j."""
    n = len(units)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(units, dtype=float))])
    size: Matrix = np.triu(before[None, :] - before[:, None])
    if peaks:
        most = np.zeros((n + 1, n + 1))
        for i in range(n):
            most[i, i + 1 :] = np.maximum.accumulate(np.asarray(peaks[i:], dtype=float))
        size = size + most
    return size


def arrange(stages_s: Sequence[Matrix]) -> tuple[tuple[int, ...], float]:
    """Split n units into `len(stages_s)` runs, one for each stage in order, that minimise the slowest stage; exact.

    Args:
        stages_s: [stage][i, j] seconds of that stage if it has units i to j - 1: on its own kind of device, infinite where that does not
            fit its memory.

    Returns:
        As `balance`; of equally slow splits the one whose stages take least together.

    >>> fast, slow = runs_s([1, 1, 1, 1], [0, 0, 0]), runs_s([3, 3, 3, 3], [0, 0, 0])
    >>> arrange([fast, slow])
    ((3,), 3.0)

    Raises:
        Infeasible: fewer units than stages, or no split in which every stage fits.
    """
    p = len(stages_s)
    n = stages_s[0].shape[0] - 1 if p else 0
    if p < 1 or p > n:
        raise Infeasible(f"{p} pipeline stages but only {n} places to put one; use pipeline<={n}")
    limit = _split(stages_s, np.inf)[1]
    if not np.isfinite(limit):
        raise Infeasible(f"no split of {n} units into {p} stages in which every stage fits its device")
    return _split(stages_s, limit)[0], float(limit)


def _split(stages_s: Sequence[Matrix], limit: float) -> tuple[tuple[int, ...], float]:
    """The split with the least slowest stage; under a finite `limit` on every stage, the one with the least sum."""
    p, n = len(stages_s), stages_s[0].shape[0] - 1
    least_sum = bool(np.isfinite(limit))
    allowed: dict[int, Matrix] = {}  # stages on one kind of device share a matrix

    def seconds(k: int) -> Matrix:
        one = stages_s[k]
        if not least_sum:
            return one
        if id(one) not in allowed:
            allowed[id(one)] = np.where(one <= limit * (1 + 1e-12), one, np.inf)
        return allowed[id(one)]

    best = seconds(0)[0].copy()
    choice = np.zeros((p, n + 1), dtype=int)
    places = np.arange(n + 1)
    for k in range(1, p):
        total = best[:, None] + seconds(k) if least_sum else np.maximum(best[:, None], seconds(k))
        choice[k] = np.argmin(total, axis=0)
        best = total[choice[k], places]
    starts: list[int] = []
    end = n
    for k in range(p - 1, 0, -1):
        end = int(choice[k][end])
        starts.append(end)
    return tuple(reversed(starts)), float(best[n])
