"""GPipe: every microbatch forward, then every microbatch backward.

In: sizes. Out: the computes of each rank; rank s has stage s.
"""

from __future__ import annotations

from shardwise.plan.ir.program import Compute, ComputeOp, Links


def gpipe(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return the GPipe schedule, with all m microbatches in flight; idle (p-1)/(m+p-1) of the time.

    Backwards run first in, first out: no order yields the last stage's first gradient earlier, and gradients are accumulated
    in the serial order, so that sums round the same. (Huang et al., "GPipe", NeurIPS 2019.)
    """
    return [[Compute(op, s, m) for op in (ComputeOp.F, ComputeOp.B) for m in range(num_microbatches)] for s in range(num_stages)]
