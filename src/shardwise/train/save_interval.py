"""The checkpoint interval that minimises saving time plus time lost to failures, from the cost of a save and the failure rate.

Young 1974, "A first order approximation to the optimum checkpoint interval"; Daly 2006, "A higher order estimate of the optimum checkpoint
interval", equation 37. Not modelled: correlated failures.
"""

from __future__ import annotations

from math import sqrt

FIRST_SAVE_S = 60.0  # until the first save, before its cost is known
RUN_MTBF_S = 24 * 3600.0  # a process is killed, a machine is taken away, a disk is full
# 419 interruptions of 16,384 H100 in 54 days (Grattafiori et al. 2024, table 5).
RANK_MTBF_S = 54 * 24 * 3600.0 * 16384 / 419


def interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds from the end of a save to the next, for a save of `save_s` and the given mean time between failures.

    >>> round(interval_s(1.0, 86400.0)), round(interval_s(60.0, 3600.0))
    (415, 605)
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return sqrt(2 * save_s * mtbf_s) * (1 + sqrt(ratio) / 3 + ratio / 9) - save_s


def mean_time_between_failures_s(num_ranks: int) -> float:
    """Mean time between failures of a run, in seconds, by number of ranks.

    >>> round(mean_time_between_failures_s(1) / 3600, 2), round(mean_time_between_failures_s(16384) / 3600, 2)
    (23.99, 2.74)
    """
    return 1 / (1 / RUN_MTBF_S + num_ranks / RANK_MTBF_S)


class SaveInterval:
    """Decides when a save is due, from the cost of the last save. `now_s`: seconds of any monotonic clock. `chosen_s`: from one save to the
    next."""

    def __init__(self, num_ranks: int, now_s: float) -> None:
        self._mtbf_s = mean_time_between_failures_s(num_ranks)
        self.chosen_s = FIRST_SAVE_S
        self._next_save_s = now_s + FIRST_SAVE_S

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_save_s

    def record_save(self, save_s: float, now_s: float) -> None:
        """Record a save that cost training `save_s` and ended at `now_s`."""
        self.chosen_s = interval_s(save_s, self._mtbf_s)
        self._next_save_s = now_s + self.chosen_s
