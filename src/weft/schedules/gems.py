"""GEMS: two replicas of the pipeline in opposite directions, and the forward of one fills the bubble of the other's backward.

In: sizes. Out: the computes of each rank: of replica 1, which has the even microbatches, stage s is on rank s; of replica 2, which has
the odd ones, on rank p-1-s. Rank r so has stages r and p-1-r, whose gradients it exchanges with rank p-1-r (see
`weft.schedules.lower.gradient_exchange`).
"""

from __future__ import annotations

from weft.plan.program import Compute, Links, Op


def gems(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """MAST with 2 microbatches, MASTER with 2 for every repeat: D(F+B) + (n-1)(D·B+F) where MP-Basic takes n·D(F+B), if B >= F.

    Holds one microbatch, of either of its stages, whatever the repeats. A rank has the weights of two stages. Any number of stages: of
    an odd one the middle stage is on one rank alone. (Jain et al., "GEMS", SC 2020.)
    """
    p = num_stages
    return [[Compute(op, r if m % 2 == 0 else p - 1 - r, m) for m in range(num_microbatches) for op in (Op.F, Op.B)] for r in range(p)]
