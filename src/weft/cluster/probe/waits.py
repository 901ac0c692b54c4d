"""How much longer ranks compute where they meet on the way. In: a world. Out: a part of the compute. [torch]

Cores do not run evenly: neighbours, interrupts and caches slow now one of them, now another. Ranks that meet once a step average that out;
ranks that meet inside every layer wait each time for the one that was slower, and multiply at the same moments, in which cores that share
something have less of it. Not modelled: that the part may hang on how much is computed between two meetings.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

MEETINGS, ROUNDS = 10, 15
WIDTH, ROWS = 1024, 256  # of products that take some milliseconds on one core
SUMMED = 1 << 18  # float32 elements that are summed at every meeting
MOST = 0.25  # more was somebody else's load


def measure_waits(world: Any) -> float:
    """What meeting after each of several products adds to them, in parts of their time without; sums themselves are taken off.

    The same on every rank: times are of the slowest, apart and together in turns, and the median of their ratios.
    """
    x, weight, room = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.zeros(SUMMED)

    def taken(computes: bool, meets: bool) -> float:
        world.everyone.barrier()
        began = time.perf_counter()
        for _ in range(MEETINGS):
            if computes:
                torch.nn.functional.gelu(x @ weight)
            if meets:
                world.everyone.all_reduce(room)
        spent = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        world.everyone.all_reduce(spent, op="max")
        return float(spent)

    waits = []
    for number in range(-1, ROUNDS):  # the first makes pages and connections
        apart, together, sums = taken(True, False), taken(True, True), taken(False, True)
        if number >= 0:
            waits.append((together - sums) / apart - 1)
    return min(MOST, max(0.0, median(waits)))
