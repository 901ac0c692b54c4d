"""Compute benchmark of one rank of the probe. In: a world. Out: plain numbers. [torch]"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from shardwise.cluster.probe.machine import resident_bytes
from shardwise.cluster.probe.operators import PULSE, operator_cases, pulse_case
from shardwise.cluster.probe.sampling import ProbeCase, ProbeSetting, SamplingBudget, sample_cases

QUICK = SamplingBudget(min_samples=2, max_samples=7, spread=0.02, seconds=6.0)
FULL = SamplingBudget(min_samples=6, max_samples=20, spread=0.01, seconds=60.0)
PACE = SamplingBudget(min_samples=5, max_samples=9, spread=0.02)
PREALLOCATED_BYTES = 128 << 20  # more than the results of a thread's calls


def measure_rank(world: Any, num_cores: int, quick: bool) -> dict[str, Any]:
    """Time every operator alone on one core, alone on all cores, and on all ranks at once.

    Returns:
        `speeds`: (ranks, threads, seconds per unit by case, share of its cores that this rank got) of the settings in which this rank
        takes part; `scratch`: bytes of this process without tensors.
    """
    rank, size = world.rank, world.num_ranks
    scratch = float(resident_bytes())
    device, threads_before = torch.device("cpu"), torch.get_num_threads()
    settings: list[ProbeSetting] = []
    cases: dict[int, tuple[ProbeCase, ...]] = {}
    # The last one first: all ranks then allocate their tensors and load kernels at the same time.
    for ranks, threads in reversed(dict.fromkeys(((1, 1), (1, num_cores), (min(num_cores, size), max(1, num_cores // size))))):
        setting = ProbeSetting(ranks, threads)
        if rank < ranks:
            setting.cases = cases[threads] = cases.get(threads) or warmed_cases(device, threads)
            if ranks > 1:
                group = world.group(tuple(range(ranks)))
                setting.wait_for_ranks = partial(_wait_for_ranks, group)
        settings.insert(0, setting)
        _wait_for_ranks(world.world_group)

    def agree(numbers: list[float]) -> list[float]:
        maxima = torch.tensor(numbers, dtype=torch.float64)
        world.world_group.all_reduce(maxima, op="max")
        return maxima.tolist()

    names = [case.name for case in settings[-1].cases or operator_cases(device, 1)]
    sample_cases(settings, names, device, QUICK if quick else FULL, agree)
    torch.set_num_threads(threads_before)
    return {"speeds": [(s.ranks, s.threads, s.seconds(), s.core_share) for s in settings if s.cases], "scratch": scratch}


def _wait_for_ranks(group: Any) -> None:
    group.all_reduce(torch.zeros(1))


def measure_alone(device: torch.device, quick: bool = True) -> dict[str, float]:
    """Return seconds per unit of every benchmark case, on this rank's threads, while nothing else of the probe runs."""
    setting = ProbeSetting(1, torch.get_num_threads(), warmed_cases(device, torch.get_num_threads()))
    sample_cases([setting], [case.name for case in setting.cases], device, QUICK if quick else FULL)
    return setting.seconds()


def measure_pace(pulses_per_s: float) -> float:
    """Return the current speed of one core relative to `pulses_per_s` measured before."""
    threads = torch.get_num_threads()
    setting = ProbeSetting(1, 1, (pulse_case(),))
    setting.cases[0].call()
    try:
        sample_cases([setting], [PULSE], torch.device("cpu"), PACE)
    finally:
        torch.set_num_threads(threads)
    return 1 / setting.seconds()[PULSE] / pulses_per_s


def warmed_cases(device: torch.device, threads: int) -> tuple[ProbeCase, ...]:
    """Return the cases for `threads` threads, each called once: libraries load, select kernels and allocate in their first call."""
    torch.set_num_threads(threads)
    cases = tuple(operator_cases(device, threads))
    # A launched rank retains freed memory: results of calls then use mapped pages, as after some steps of training.
    torch.ones(threads * PREALLOCATED_BYTES // 4)
    for case in cases:
        case.call()
    return cases
