"""Pipeline stage boundaries by dynamic programming: partition a chain of units so that the slowest stage is as fast as possible.

Exact. A stage's time is that of its units and of the transfers across both its boundaries; every stage may have times and limits of its
own: its device, its memory, its microbatches in flight. Not modelled: what stages other than the slowest add to the step.

`select_cuts`: the cuts of a model that are worth trying as boundaries, by the bytes that cross them and the work between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import Infeasible
from shardwise.model.stages.stages import StageCut

MAX_CUTS = 400
MAX_GAP, MIN_GAP = 0.75, 0.25  # of a stage's even share: work between two cuts above which more are added, and the target
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


def select_cuts(cuts: Sequence[StageCut], min_cuts: int, work: Sequence[float] = ()) -> list[StageCut]:
    """Select the cuts worth trying: those where little crosses, but at least `min_cuts` of them, and as many as divide the work.

    Between two layers of a transformer only the residual crosses; inside one several times as much does. Where activations shrink from
    layer to layer, least crosses between the last ones, which alone would leave nearly all of the model to one stage: so the stretch
    between two cuts is cut again where least crosses, until the work can be divided.

    Args:
        work: of every operator, in any unit; if empty, the bytes that cross decide alone.
    """
    if not cuts:
        return []
    sizes = sorted({cut.size_bytes for cut in cuts})
    kept_cuts: list[StageCut] = []
    for limit in sizes:
        kept_cuts = [cut for cut in cuts if cut.size_bytes <= limit]
        # Above the smallest size, only as many as are needed to have a choice.
        if len(kept_cuts) >= max(2 * min_cuts, 8):
            break
    if sum(work) > 0:
        kept_cuts = _add_cuts(cuts, kept_cuts, work, sum(work) / (min_cuts + 1))
    if len(kept_cuts) > MAX_CUTS:
        step = len(kept_cuts) / MAX_CUTS
        kept_cuts = [kept_cuts[int(i * step)] for i in range(MAX_CUTS)]
    return kept_cuts


def _add_cuts(cuts: Sequence[StageCut], chosen: Sequence[StageCut], work: Sequence[float], stage_work: float) -> list[StageCut]:
    """Return `chosen`, and further cuts where more than a stage's even `stage_work` lies between two of them."""
    cumulative = [0.0, *accumulate(work)]
    ends = [0, *(cut.index for cut in chosen), len(work)]
    added: list[StageCut] = []
    for start, end in pairwise(ends):
        if cumulative[end] - cumulative[start] > MAX_GAP * stage_work:
            added += _cuts_between([cut for cut in cuts if start < cut.index < end], start, end, cumulative, MIN_GAP * stage_work)
    return sorted([*chosen, *added], key=lambda cut: cut.index)


def _cuts_between(cuts: Sequence[StageCut], start: int, end: int, cumulative_work: Sequence[float], max_work: float) -> list[StageCut]:
    """Return the cuts of a stretch at which least crosses, so that at most `max_work` lies between two, as far as there are any."""
    if not cuts or cumulative_work[end] - cumulative_work[start] <= max_work:
        return []
    least = min(cut.size_bytes for cut in cuts)
    smallest = [cut for cut in cuts if cut.size_bytes <= least]
    cuts_between = list(smallest)
    ends = [start, *(cut.index for cut in smallest), end]
    for first, last in pairwise(ends):
        cuts_between += _cuts_between([cut for cut in cuts if first < cut.index < last], first, last, cumulative_work, max_work)
    return cuts_between
