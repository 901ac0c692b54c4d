"""MP-Basic (sequential): each microbatch runs its whole forward and backward before the next one starts; one stage is busy at a time.

In: sizes. Out: the computes of each rank; rank s has stage s.
"""

from __future__ import annotations

from shardwise.plan.ir.program import Compute, ComputeOp, Links


def sequential(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return forward and backward in alternation: 1 microbatch in flight, each rank busy 1/p of the time."""
    return [[Compute(op, s, m) for m in range(num_microbatches) for op in (ComputeOp.F, ComputeOp.B)] for s in range(num_stages)]
