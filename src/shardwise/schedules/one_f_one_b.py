"""1F1B: after a few forwards to fill the pipeline, each stage alternates one forward and one backward.

In: sizes and links. Out: the computes of each rank; rank s has stage s.
"""

from __future__ import annotations

from shardwise.plan.ir.program import Compute, ComputeOp, Links


def one_f_one_b(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return the 1F1B schedule, which takes GPipe's time with at most p microbatches in flight.

    A stage warms up with as many forwards as there are links on the longest path from it to the end, p - 1 - s in a chain,
    and so saves at most min(p - s, m) microbatches. (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
    ICML 2021: PipeDream-Flush.)
    """
    ahead = [0] * num_stages
    for source, target in sorted(links, reverse=True):
        ahead[source] = max(ahead[source], ahead[target] + 1)
    rows = []
    for s in range(num_stages):
        warmup = min(ahead[s], num_microbatches)
        row = [Compute(ComputeOp.F, s, m) for m in range(warmup)]
        for m in range(num_microbatches):
            if warmup + m < num_microbatches:
                row.append(Compute(ComputeOp.F, s, warmup + m))
            row.append(Compute(ComputeOp.B, s, m))
        rows.append(row)
    return rows
