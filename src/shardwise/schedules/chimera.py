"""Chimera: two 1F1B pipelines in opposite directions, half of the microbatches each, so that one fills the other's bubble.

In: sizes. Out: the computes of each rank: even microbatches run stage s on rank s, odd ones on rank p-1-s. Rank r has stages r and
p-1-r, whose gradients it exchanges with rank p-1-r. Not modelled: forwards of two microbatches at once.
"""

from __future__ import annotations

from shardwise.plan.ir.program import Compute, ComputeOp, Links
from shardwise.schedules.list_scheduling import StageMicrobatches, list_schedule


def chimera(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return the Chimera schedule: idle for p/2-1 forwards and p/2-1 backwards if F = B, for p-2 backwards if B = 2F; even p, m >= p.

    Takes p·F + (2p-2)B + (m-p)(F+B) if F <= B and p divides m. A stage's replica saves at most p-s microbatches, as 1F1B, so a rank at
    most p+1, and p where m = p. (Li and Hoefler, "Chimera", SC 2021, sections 3.1 and 3.3.)
    """
    p = num_stages
    even, odd = range(0, num_microbatches, 2), range(1, num_microbatches, 2)
    places = [(StageMicrobatches(r, even), StageMicrobatches(p - 1 - r, odd)) for r in range(p)]
    return list_schedule(
        places,
        p,
        priority=lambda a: (a.op is ComputeOp.B, a.microbatch, a.stage),
        has_memory=lambda place, num_in_flight, num_on_rank: num_in_flight < p - place.stage,
        splits_backward=False,
    )
