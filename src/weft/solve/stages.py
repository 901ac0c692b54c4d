"""Where pipeline stages begin. In: seconds of every unit between cuts, seconds to cross each cut. Out: the cuts to use.

Dynamic programming that makes the slowest stage as fast as it can be, a stage's time being its units' and the crossings at both
its ends; exact. Not modelled: memory by stage (the search refuses what does not fit), stages on several devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.errors import Infeasible
from weft.model.stages import Cut

MOST_CUTS = 400


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
    n = len(units_s)
    if num_stages < 1 or num_stages > n:
        raise Infeasible(f"{num_stages} pipeline stages but only {n} places to put one; use pipeline<={n}")
    before = np.concatenate([[0.0], np.cumsum(np.asarray(units_s, dtype=float))])
    cross = np.concatenate([[0.0], np.asarray(crossings_s, dtype=float), [0.0]])
    # seconds[i, j]: a stage of units i to j - 1.
    seconds = before[None, :] - before[:, None] + cross[None, :] + cross[:, None]
    seconds[np.tri(n + 1, dtype=bool)] = np.inf
    best = seconds[0].copy()
    choice = np.zeros((num_stages, n + 1), dtype=int)
    for k in range(1, num_stages):
        slowest = np.maximum(best[:, None], seconds)
        choice[k] = np.argmin(slowest, axis=0)
        best = slowest[choice[k], np.arange(n + 1)]
    starts: list[int] = []
    end = n
    for k in range(num_stages - 1, 0, -1):
        end = int(choice[k][end])
        starts.append(end)
    return tuple(reversed(starts)), float(best[n])


def useful(cuts: Sequence[Cut], least: int) -> list[Cut]:
    """The cuts worth trying: those where little crosses, but at least `least` of them.

    Between two layers of a transformer only the residual crosses; inside one several times as much does.
    """
    if not cuts:
        return []
    sizes = sorted({cut.size_bytes for cut in cuts})
    found: list[Cut] = []
    for limit in sizes:
        found = [cut for cut in cuts if cut.size_bytes <= limit]
        # Beyond the least size, only as many as are needed to have a choice.
        if len(found) >= max(2 * least, 8):
            break
    if len(found) > MOST_CUTS:
        step = len(found) / MOST_CUTS
        found = [found[int(i * step)] for i in range(MOST_CUTS)]
    return found
