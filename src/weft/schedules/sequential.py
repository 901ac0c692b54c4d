"""MP-Basic: a microbatch goes all the way down and all the way back before the next one starts; one stage is busy at a time.

In: sizes. Out: the computes of each rank, rank s having stage s.
"""

from __future__ import annotations

from weft.plan.program import Compute, Links, Op


def sequential(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Forward and backward in turn: keeps 1 microbatch in flight, busy 1/p of the time."""
    return [[Compute(op, s, m) for m in range(num_microbatches) for op in (Op.F, Op.B)] for s in range(num_stages)]
