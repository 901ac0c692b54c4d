"""Interleaved 1F1B: every rank has several stages, `chunks` of them, so that the pipeline fills and drains in shorter steps.

In: sizes and links. Out: the computes of each rank; of p ranks, rank r has stages r, r + p, r + 2p, ...
"""

from __future__ import annotations

from itertools import pairwise

from shardwise.plan.ir.program import Compute, ComputeOp, Links
from shardwise.schedules.one_f_one_b import one_f_one_b


def interleaved(num_stages: int, num_microbatches: int, links: Links, chunks: int = 1) -> list[list[Compute]]:
    """Return interleaved 1F1B: bubble (p-1)/(v·m) of the compute, v = `chunks`, where 1F1B has (p-1)/m, for any m >= p.

    With fewer microbatches it takes (pv + m - 1)(F + B) of a stage, which is optimal: the last rank cannot start its m forwards
    and backwards of the last stage before pv - 1 forwards, and pv - 1 backwards follow them.

    A group of p microbatches runs through chunk 0, then through chunk 1, and so on; backward in the opposite order of chunks. Rank r
    warms up with 2(p-1-r) + (v-1)p forwards. If p does not divide m, the groups are as equal as possible and larger than p, since a
    shorter one would wait for itself. (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021,
    section 2.2.)
    """
    if chunks == 1:
        return one_f_one_b(num_stages, num_microbatches, links)
    p = num_stages // chunks
    forward: list[tuple[int, int]] = []  # (chunk, microbatch) in order
    backward: list[tuple[int, int]] = []
    for group in _microbatch_groups(num_microbatches, p):
        forward += [(c, m) for c in range(chunks) for m in group]
        backward += [(c, m) for c in reversed(range(chunks)) for m in group]
    total = len(forward)
    longest = max(map(len, _microbatch_groups(num_microbatches, p)))
    warmup = [min(total - 1, 2 * (p - 1 - r) + (chunks - 1) * longest) for r in range(p)]
    rows = []
    for r in range(p):
        row = [Compute(ComputeOp.F, c * p + r, m) for c, m in forward[: warmup[r]]]
        for i, (c, m) in enumerate(backward):
            if warmup[r] + i < total:
                chunk, microbatch = forward[warmup[r] + i]
                row.append(Compute(ComputeOp.F, chunk * p + r, microbatch))
            row.append(Compute(ComputeOp.B, c * p + r, m))
        rows.append(row)
    return rows


def _microbatch_groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Return the microbatches in order, in groups of at least `num_ranks`, as equal as possible; one group if there are fewer."""
    count = max(1, num_microbatches // num_ranks)
    ends = [i * num_microbatches // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]
