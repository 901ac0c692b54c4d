"""Autoscaling decisions: the demand and machines to replan for, from measured request rates and failed workers.

A machine whose replica died counts as failed: Ray restarts the replica elsewhere, the plan accounts for the cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from weft.serve.assign import Ask
from weft.serve.workflow import Machines

MOST, LEAST = 1.15, 0.6  # ratios of measured to planned rate beyond which a new plan is made
ROOM = 1.05  # planned rate over the measured one
WINDOW_S, LONG_S = 20.0, 120.0  # windows over which a rise and a fall of the rate are measured
ENOUGH = 400  # fewest requests that a rate is measured from: Poisson arrivals, standard error 5 %


@dataclass(frozen=True)
class Rates:
    """Samples of the request counter: (seconds, number of requests so far)."""

    seen: tuple[tuple[float, int], ...] = ()

    def with_count(self, at_s: float, arrived: int) -> Rates:
        """Return the rates with one more sample, without those before the first request or (except one) before the long window."""
        samples = (*(sample for sample in self.seen if sample[1]), (at_s, arrived))
        while len(samples) > 2 and samples[1][0] <= at_s - LONG_S:
            samples = samples[1:]
        return Rates(samples)

    def over(self, window_s: float) -> float | None:
        """Requests/s over the last `window_s` seconds; None if the window is not full or has too few requests."""
        if not self.seen:
            return None
        end, last = self.seen[-1]
        begin, first = next((sample for sample in reversed(self.seen) if sample[0] <= end - window_s), (end, last))
        return (last - first) / (end - begin) if last - first >= ENOUGH else None


def without(machines: Machines, lost: Mapping[str, str]) -> Machines:
    """Return the machines without failed ones. `failed_workers`: worker names by failed replica."""
    num_failed = Counter(lost.values())
    workers = tuple(replace(w, count=w.count - num_failed[w.name]) for w in machines.workers if w.count > num_failed[w.name])
    names = {w.name for w in machines.workers} - {w.name for w in workers}
    return Machines(workers, tuple(link for link in machines.links if not {link.start, link.end} & names))


def wanted(ask: Ask, lately: float | None, long: float | None) -> Ask:
    """Return the demand to plan for: unchanged, unless the short-window rate is above it or the long-window rate below it."""
    if lately is not None and lately > MOST * ask.rate:
        return replace(ask, rate=ROOM * lately)
    if long is not None and long < LEAST * ask.rate:
        return replace(ask, rate=ROOM * long)
    return ask
