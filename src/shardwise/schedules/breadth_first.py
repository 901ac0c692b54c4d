"""Breadth-first: every rank has several stages, and all microbatches go through one of them before any goes through the next.

In: sizes and links. Out: the computes of each rank; of p ranks, rank r has stages r, r + p, r + 2p, ...
"""

from __future__ import annotations

from shardwise.plan.ir.program import Compute, ComputeOp, Links


def breadth_first(num_stages: int, num_microbatches: int, links: Links, chunks: int = 1) -> list[list[Compute]]:
    """Return the breadth-first schedule: bubble (p-1)/(v·m), v = `chunks`, as interleaved 1F1B, for m >= p; saves v·m activations a rank.

    What a stage needs for all of its microbatches (weights sharded by ZeRO, the gradient reduction) is needed once a pass instead of
    once a group of microbatches. (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, section 4.)
    """
    p = num_stages // chunks
    forward = [(c, m) for c in range(chunks) for m in range(num_microbatches)]
    backward = [(c, m) for c in reversed(range(chunks)) for m in range(num_microbatches)]
    return [
        [Compute(op, c * p + r, m) for op, order in ((ComputeOp.F, forward), (ComputeOp.B, backward)) for c, m in order] for r in range(p)
    ]
