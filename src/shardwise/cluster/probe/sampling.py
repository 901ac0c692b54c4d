"""Timing in rounds until medians are known precisely. In: cases of several settings. Out: seconds per unit of each. [torch]

A round times every case once, so that a disturbance of the machine affects few samples of each case and not all samples of one.
The result is the median of the rounds: the minimum is rarely reached by threads that wait for one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb, inf
from statistics import median
from typing import Any

import torch

SLICE_S = 0.015  # minimum time of a case in a round
LONG_S = 0.05  # a call of this length is timed once: it finds only its own data in the caches
MOST_CALLS = 50  # maximum calls of a case in a round
CONFIDENCE = 0.5


@dataclass(frozen=True, slots=True)
class SamplingBudget:
    """Limits of sampling: until the median is known within the fraction `median_spread`, with `min_samples` to `max_samples` samples, and
    only
    `min_samples` once `seconds` have passed."""

    min_samples: int
    max_samples: int
    spread: float
    seconds: float = inf


@dataclass(frozen=True, slots=True)
class ProbeCase:
    """A call of `units` of work (FLOPs, bytes, operators). `keeps_busy`: it keeps all threads busy, so that CPU time shows their share
    of the cores."""

    name: str
    units: float
    call: Callable[[], Any]
    keeps_busy: bool = False


@dataclass
class ProbeSetting:
    """A setting in which `ranks` ranks of `threads` threads work concurrently. `cases`: none if this rank does not take part.
    `wait_for_ranks` waits for the others that do. Results accumulate over rounds: `times`, seconds of each case; wall and CPU seconds of
    cases that keep all threads busy."""

    ranks: int
    threads: int
    cases: tuple[ProbeCase, ...] = ()
    wait_for_ranks: Callable[[], Any] = lambda: None
    times: dict[str, list[float]] = field(default_factory=dict)
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def seconds(self) -> dict[str, float]:
        """Return the seconds per unit of each case."""
        return {case.name: median(self.times[case.name]) / case.units for case in self.cases}

    @property
    def core_share(self) -> float:
        """Share of its cores that this rank got."""
        return self.cpu_s / self.wall_s / self.threads if self.wall_s else 1.0

    def time_cases(self, names: Sequence[str], device: torch.device) -> None:
        """Time each case of `names` once."""
        for case in self.cases:
            if case.name in names:
                self.wait_for_ranks()
                began, used = time.perf_counter(), time.process_time()
                self.times.setdefault(case.name, []).append(_time_case(case, device))
                if case.keeps_busy:
                    self.cpu_s += time.process_time() - used
                    self.wall_s += time.perf_counter() - began


def median_interval(times: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median at level `CONFIDENCE`, bounded by two samples; infinite if there are too few.

    The k-th of n samples and the k-th from the end hold it with a chance of 1 - 2 P(Binomial(n, 1/2) < k), whatever their distribution
    (Conover 1999, Practical Nonparametric Statistics, 3.2).

    >>> median_interval([1.0, 3.0]), median_interval([1.0, 1.0, 9.0, 1.0, 1.5]), median_interval([1.0])
    ((1.0, 3.0), (1.0, 1.5), (-inf, inf))
    """
    n, k = len(times), 0
    while 1 - 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n >= CONFIDENCE:
        k += 1
    if k == 0:
        return -inf, inf
    ordered = sorted(times)
    return ordered[k - 1], ordered[n - k]


def median_spread(times: Sequence[float]) -> float:
    """Return the relative uncertainty of the median: half of its confidence interval."""
    low, high = median_interval(times)
    return (high - low) / 2 / median(times) if low > -inf else inf


def sample_cases(
    settings: Sequence[ProbeSetting],
    names: Sequence[str],
    device: torch.device,
    patience: SamplingBudget,
    agree: Callable[[list[float]], list[float]] = list,
) -> None:
    """Run rounds of all settings in turn until every case is known. Every rank calls it with the same settings and names.

    `agree`: maximum of each number over all ranks, so that all continue with the same cases; it synchronises the ranks.
    """
    began = time.perf_counter()
    unknown = [tuple(names) for _ in settings]
    for number in range(1, patience.max_samples + 1):
        for setting, missing in zip(settings, unknown, strict=True):
            agree([0.0])
            if setting.cases and missing:
                torch.set_num_threads(max(1, setting.threads))
                setting.time_cases(missing, device)
        if number < patience.min_samples:
            continue
        spreads = [median_spread(setting.times[name]) if setting.cases else 0.0 for setting in settings for name in names]
        *spreads, elapsed = agree([*spreads, time.perf_counter() - began])
        by_case = iter(spreads)
        unknown = [tuple(name for name in names if next(by_case) > patience.spread) for _ in settings]
        if elapsed > patience.seconds or not any(unknown):
            return


def _time_case(case: ProbeCase, device: torch.device) -> float:
    """Return the median seconds of a call. The first of several does not count: it finds its tensors outside the caches."""
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < (LONG_S if len(times) < 2 else SLICE_S):
        start = time.perf_counter()
        case.call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:] or times)
