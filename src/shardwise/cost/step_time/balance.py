"""Pipeline stage boundaries by dynamic programming: partition a chain of units so that the slowest stage is as fast as possible.

Exact. A stage's time is that of its units and of the transfers across both its boundaries; every stage may have times and limits of its
own: its device, its memory, its microbatches in flight. Not modelled: what stages other than the slowest add to the step.

"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import Infeasible

Matrix = NDArray[np.float64]


def balance_stages(units_s: Sequence[float], crossings_s: Sequence[float], num_stages: int) -> tuple[tuple[int, ...], float]:
    """Split a chain of units into `num_stages` stages that minimise the slowest one.

    Args:
        units_s: seconds of each unit, n of them.
        crossings_s: seconds to cross between unit i and i + 1, n - 1 of them; counted for the stages on both sides.

    Returns:
        Indices of the first unit of every stage after the first, and the slowest stage's seconds.

    >>> balance_stages([1, 1, 1, 3], [0, 0, 0], 2)
    ((3,), 3.0)

    Raises:
        Infeasible: fewer units than stages.
    """
    even = _balance_equal_crossings(units_s, crossings_s, num_stages)
    return even if even is not None else minimize_slowest_stage([stage_time_matrix_s(units_s, crossings_s)] * num_stages)


def _balance_equal_crossings(
    units_s: Sequence[float], crossings_s: Sequence[float], num_stages: int
) -> tuple[tuple[int, ...], float] | None:
    """Compute `balance_stages` much faster where every boundary costs the same; None where it does not or greed needs fewer stages.

    A limit is tested by filling stages from the last; the smallest limit is found by bisection. Of equal splits the one
    whose first stages are lightest is returned, since those keep most microbatches in flight.
    """
    n = len(units_s)
    if not 2 <= num_stages <= n or len(set(crossings_s)) != 1:
        return None
    cross = crossings_s[0]
    sums = [0.0, *np.cumsum(np.asarray(units_s, dtype=float)).tolist()]

    def filled(limit: float) -> list[int] | None:
        """Return the first units of the later stages, from the last; [] if the limit is too small, None if it needs fewer stages."""
        starts: list[int] = []
        end = n
        while True:
            available = limit - (cross if end < n else 0.0)
            if sums[end] <= available:
                return starts if len(starts) == num_stages - 1 else None
            if len(starts) == num_stages - 1:
                return []
            # Leave at least one unit for each stage that is still to be filled.
            start = max(bisect_left(sums, sums[end] - (available - cross)), num_stages - 1 - len(starts))
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


def stage_time_matrix_s(units_s: Sequence[float], crossings_s: Sequence[float], exit_crossings_s: Sequence[float] | None = None) -> Matrix:
    """Seconds of a stage of units i to j - 1, at [i, j] of n + 1 by n + 1, transfers at both its boundaries included; infinite where i >=
    j.
    `exit_crossings_s`: those at its end, where they differ from those at its beginning."""
    n = len(units_s)
    before = np.concatenate([[0.0], np.cumsum(np.asarray(units_s, dtype=float))])
    enter, leave = (np.array([0.0, *cross, 0.0]) for cross in (crossings_s, crossings_s if exit_crossings_s is None else exit_crossings_s))
    seconds: Matrix = before[None, :] - before[:, None] + leave[None, :] + enter[:, None]
    seconds[np.tri(n + 1, dtype=bool)] = np.inf
    return seconds


def stage_memory_matrix(units: Sequence[float], peaks: Sequence[float] = ()) -> Matrix:
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


def minimize_slowest_stage(stages_s: Sequence[Matrix]) -> tuple[tuple[int, ...], float]:
    """Split n units into `len(stages_s)` stages in order that minimise the slowest stage; exact.

    Args:
        stages_s: [stage][i, j] seconds of that stage if it has units i to j - 1: on its own kind of device, infinite where that does not
            fit its memory.

    Returns:
        The same as `balance_stages`; of equally slow splits the one with the least sum of its stages.

    >>> fast, slow = stage_time_matrix_s([1, 1, 1, 1], [0, 0, 0]), stage_time_matrix_s([3, 3, 3, 3], [0, 0, 0])
    >>> minimize_slowest_stage([fast, slow])
    ((3,), 3.0)

    Raises:
        Infeasible: fewer units than stages, or no split in which every stage fits.
    """
    p = len(stages_s)
    n = stages_s[0].shape[0] - 1 if p else 0
    if p < 1 or p > n:
        raise Infeasible(f"{p} pipeline stages but only {n} places to put one; use pipeline<={n}")
    limit = _solve_partition(stages_s, np.inf)[1]
    if not np.isfinite(limit):
        raise Infeasible(f"no split of {n} units into {p} stages in which every stage fits its device")
    return _solve_partition(stages_s, limit)[0], float(limit)


def _solve_partition(stages_s: Sequence[Matrix], limit: float) -> tuple[tuple[int, ...], float]:
    """Return the split with the fastest slowest stage; under a finite `limit` on every stage, the one with the least sum."""
    p, n = len(stages_s), stages_s[0].shape[0] - 1
    least_sum = bool(np.isfinite(limit))
    allowed: dict[int, Matrix] = {}  # stages on the same kind of device share a matrix

    def seconds(k: int) -> Matrix:
        matrix = stages_s[k]
        if not least_sum:
            return matrix
        if id(matrix) not in allowed:
            allowed[id(matrix)] = np.where(matrix <= limit * (1 + 1e-12), matrix, np.inf)
        return allowed[id(matrix)]

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
