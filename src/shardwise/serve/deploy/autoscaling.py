"""Autoscaling decisions: the demand and machines to replan for, from measured request rates and failed workers.

A machine whose replica died counts as failed: Ray restarts the replica elsewhere, the plan accounts for the cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.serve.placement.assignment_milp import Demand
from shardwise.serve.placement.workflow import Machines

MAX_RATE_RATIO, MIN_RATE_RATIO = 1.15, 0.6  # ratios of measured to planned rate beyond which a new plan is made
RATE_HEADROOM = 1.05  # planned rate over the measured one
SHORT_WINDOW_S, LONG_WINDOW_S = 20.0, 120.0  # windows over which a rise and a fall of the rate are measured
MIN_REQUESTS = 400  # fewest requests that a rate is measured from: Poisson arrivals, standard error 5 %


@dataclass(frozen=True)
class RequestRates:
    """Samples of the request counter: (seconds, number of requests so far)."""

    samples: tuple[tuple[float, int], ...] = ()

    def with_count(self, at_s: float, num_arrived: int) -> RequestRates:
        """Return the rates with one more sample, without those before the first request or (except one) before the long window."""
        samples = (*(sample for sample in self.samples if sample[1]), (at_s, num_arrived))
        while len(samples) > 2 and samples[1][0] <= at_s - LONG_WINDOW_S:
            samples = samples[1:]
        return RequestRates(samples)

    def rate_over(self, window_s: float) -> float | None:
        """Requests/s over the last `window_s` seconds; None if the window is not full or has too few requests."""
        if not self.samples:
            return None
        end, last = self.samples[-1]
        begin, first = next((sample for sample in reversed(self.samples) if sample[0] <= end - window_s), (end, last))
        return (last - first) / (end - begin) if last - first >= MIN_REQUESTS else None


def remaining_machines(machines: Machines, failed_workers: Mapping[str, str]) -> Machines:
    """Return the machines without failed ones. `failed_workers`: worker names by failed replica."""
    num_failed = Counter(failed_workers.values())
    workers = tuple(replace(w, count=w.count - num_failed[w.name]) for w in machines.workers if w.count > num_failed[w.name])
    names = {w.name for w in machines.workers} - {w.name for w in workers}
    return Machines(workers, tuple(link for link in machines.links if not {link.start, link.end} & names))


def updated_demand(demand: Demand, short_window_rate: float | None, long_window_rate: float | None) -> Demand:
    """Return the demand to plan for: unchanged, unless the short-window rate is above it or the long-window rate below it."""
    if short_window_rate is not None and short_window_rate > MAX_RATE_RATIO * demand.rate:
        return replace(demand, rate=RATE_HEADROOM * short_window_rate)
    if long_window_rate is not None and long_window_rate < MIN_RATE_RATIO * demand.rate:
        return replace(demand, rate=RATE_HEADROOM * long_window_rate)
    return demand
