"""How long things take, in rounds that end when it is known. In: cases of several settings. Out: seconds a unit of each. [torch]

A round times every case once, so that what disturbs the machine for a moment disturbs few samples of each and not all samples of one.
The median of the rounds counts: the least is what threads that wait for one another rarely reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb, inf
from statistics import median
from typing import Any

import torch

SLICE_S = 0.015  # of a case in a round, at least
LONG_S = 0.05  # from which on a call is a slice alone: whose own operators find what they left in the caches, and no more
MOST_CALLS = 50  # in a slice
SURE = 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """Samples are taken until the median is known to `spread` of itself, but `least` at least and `most` at most, and no more than
    `least` once `seconds` are over."""

    least: int
    most: int
    spread: float
    seconds: float = inf


@dataclass(frozen=True, slots=True)
class Case:
    """A call that works off `units` (FLOPs, bytes, operators). `keeps_busy`: all threads all the time, so that the processor's time shows
    what they got of their cores."""

    name: str
    units: float
    call: Callable[[], Any]
    keeps_busy: bool = False


@dataclass
class Setting:
    """`ranks` ranks of `threads` threads each work at once. `cases`: none where this rank has no part in it. `meet` waits for the others
    that have. What was found grows with the rounds: `times`, the seconds of each case; wall and processor seconds of those that keep all
    threads busy."""

    ranks: int
    threads: int
    cases: tuple[Case, ...] = ()
    meet: Callable[[], Any] = lambda: None
    times: dict[str, list[float]] = field(default_factory=dict)
    wall_s: float = 0.0
    used_s: float = 0.0

    def seconds(self) -> dict[str, float]:
        """Of each case, per unit."""
        return {case.name: median(self.times[case.name]) / case.units for case in self.cases}

    @property
    def share(self) -> float:
        """Of its cores that this rank got."""
        return self.used_s / self.wall_s / self.threads if self.wall_s else 1.0

    def round(self, names: Sequence[str], device: torch.device) -> None:
        """Times each case of `names` once."""
        for case in self.cases:
            if case.name in names:
                self.meet()
                began, used = time.perf_counter(), time.process_time()
                self.times.setdefault(case.name, []).append(_slice(case, device))
                if case.keeps_busy:
                    self.used_s += time.process_time() - used
                    self.wall_s += time.perf_counter() - began


def interval(times: Sequence[float]) -> tuple[float, float]:
    """Two of the samples between which the true median lies in half of all cases at least; everything where they are too few for that.

    The k-th of n samples and the k-th from the end hold it with a chance of 1 - 2 P(Binomial(n, 1/2) < k), whatever their distribution
    (Conover 1999, Practical Nonparametric Statistics, 3.2).

    >>> interval([1.0, 3.0]), interval([1.0, 1.0, 9.0, 1.0, 1.5]), interval([1.0])
    ((1.0, 3.0), (1.0, 1.5), (-inf, inf))
    """
    n, k = len(times), 0
    while 1 - 2 * sum(comb(n, i) for i in range(k + 1)) / 2**n >= SURE:
        k += 1
    if k == 0:
        return -inf, inf
    ordered = sorted(times)
    return ordered[k - 1], ordered[n - k]


def spread(times: Sequence[float]) -> float:
    """How far the median may be off, as a part of it: half of the `interval`."""
    low, high = interval(times)
    return (high - low) / 2 / median(times) if low > -inf else inf


def sample(
    settings: Sequence[Setting],
    names: Sequence[str],
    device: torch.device,
    patience: Patience,
    agree: Callable[[list[float]], list[float]] = list,
) -> None:
    """Rounds of all settings in turn, of what is not known yet, until all is. Every rank calls it with the same settings and names.

    `agree`: the largest of each number over all ranks, so that all go on with the same cases; they wait for one another in it.
    """
    began = time.perf_counter()
    left = [tuple(names) for _ in settings]
    for number in range(1, patience.most + 1):
        for setting, missing in zip(settings, left, strict=True):
            agree([0.0])
            if setting.cases and missing:
                torch.set_num_threads(max(1, setting.threads))
                setting.round(missing, device)
        if number < patience.least:
            continue
        spreads = [spread(setting.times[name]) if setting.cases else 0.0 for setting in settings for name in names]
        *spreads, elapsed = agree([*spreads, time.perf_counter() - began])
        by_case = iter(spreads)
        left = [tuple(name for name in names if next(by_case) > patience.spread) for _ in settings]
        if elapsed > patience.seconds or not any(left):
            return


def _slice(case: Case, device: torch.device) -> float:
    """Median seconds of a call. Of several the first does not count: it finds its tensors outside the caches."""
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < (LONG_S if len(times) < 2 else SLICE_S):
        start = time.perf_counter()
        case.call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:] or times)
