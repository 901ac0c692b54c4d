"""Benchmark of waiting: the relative increase of compute time if ranks synchronise inside layers. In: a world. Out: a fraction. [torch]

Cores do not run evenly: neighbours, interrupts and caches slow down now one of them, now another. Ranks that synchronise once per step
average that out; ranks that synchronise inside every layer wait for the slowest each time, and multiply at the same moments, in which
shared resources are contended. Not modelled: the fraction's dependence on the compute between two synchronisations.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

MEETINGS, ROUNDS = 10, 15
WIDTH, ROWS = 1024, 256  # of products that take some milliseconds on one core
SUMMED = 1 << 18  # float32 elements that are reduced at every synchronisation
MAX_WAIT = 0.25  # a larger fraction is due to other load


def measure_waits(world: Any) -> float:
    """Return the time added to products by an all-reduce after each, relative to their own; the all-reduces' own time is subtracted.

    Equal on every rank: times are of the slowest, with and without synchronisation in turns, and the result is the median of the ratios.
    """
    x, weight, buffer = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.zeros(SUMMED)

    def taken(computes: bool, meets: bool) -> float:
        world.world_group.barrier()
        began = time.perf_counter()
        for _ in range(MEETINGS):
            if computes:
                torch.nn.functional.gelu(x @ weight)
            if meets:
                world.world_group.all_reduce(buffer)
        slowest_s = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        world.world_group.all_reduce(slowest_s, op="max")
        return float(slowest_s)

    waits = []
    for number in range(-1, ROUNDS):  # the first maps pages and opens connections
        compute_s, both_s, all_reduce_s = taken(True, False), taken(True, True), taken(False, True)
        if number >= 0:
            waits.append((both_s - all_reduce_s) / compute_s - 1)
    return min(MAX_WAIT, max(0.0, median(waits)))
