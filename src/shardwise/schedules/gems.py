"""GEMS: two replicas of the pipeline in opposite directions, and the forward of one fills the bubble of the other's backward.

In: sizes. Out: the computes of each rank: replica 1 (even microbatches) has stage s on rank s, replica 2 (odd ones) on rank p-1-s.
Rank r has stages r and p-1-r, whose gradients it exchanges with rank p-1-r (see `shardwise.schedules.lower.gradient_exchange`).
"""

from __future__ import annotations

from shardwise.plan.ir.program import Compute, ComputeOp, Links


def gems(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return GEMS-MAST (2 microbatches) or -MASTER (2 a repeat): D(F+B) + (n-1)(D·B+F), if B >= F, where MP-Basic takes n·D(F+B).

    Saves one microbatch, of either of its stages, for any number of repeats. A rank has the weights of two stages. Any number of stages:
    if it is odd, the middle stage is on one rank only. (Jain et al., "GEMS", SC 2020.)
    """
    p = num_stages
    return [
        [Compute(op, r if m % 2 == 0 else p - 1 - r, m) for m in range(num_microbatches) for op in (ComputeOp.F, ComputeOp.B)]
        for r in range(p)
    ]
