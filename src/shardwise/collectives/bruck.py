"""Bruck's all-gather: ceil(log2 n) steps for any number of ranks. In: numbers of ranks. Out: programs.

Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 1997.
"""

from __future__ import annotations

from shardwise.collectives import steps as spec
from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder, chunk_values
from shardwise.plan.ir.program import Program


def all_gather(num_ranks: int) -> Program:
    """Return the program of ceil(log2 n) steps, M(n-1)/n a rank: a rank's chunks double in every step but the last, which adds the rest.

    >>> from shardwise.plan.ir.check import check
    >>> [check(all_gather(n)) for n in (1, 5, 8)]
    [None, None, None]
    """
    n, steps, have = num_ranks, CollectiveBuilder(num_ranks), 1
    while have < n:
        count = min(have, n - have)
        steps.add_step(ChunkTransfer((r + have) % n, r, chunk_values((r + have + i) % n for i in range(count))) for r in range(n))
        have += count
    return spec.all_gather_program(steps, "bruck", [[r] for r in range(n)])
