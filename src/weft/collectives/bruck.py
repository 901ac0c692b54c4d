"""Bruck's all-gather: ceil(log2 n) steps for any number of ranks. In: numbers of ranks. Out: programs.

Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems", IEEE TPDS 1997.
"""

from __future__ import annotations

from weft.collectives import steps as spec
from weft.collectives.steps import Move, Steps, chunks
from weft.plan.program import Program


def all_gather(num_ranks: int) -> Program:
    """Return the program of ceil(log2 n) steps, M(n-1)/n a rank: a rank's chunks double in every step but the last, which adds the rest.

    >>> from weft.plan.check import check
    >>> [check(all_gather(n)) for n in (1, 5, 8)]
    [None, None, None]
    """
    n, steps, have = num_ranks, Steps(num_ranks), 1
    while have < n:
        count = min(have, n - have)
        steps.together(Move((r + have) % n, r, chunks((r + have + i) % n for i in range(count))) for r in range(n))
        have += count
    return spec.all_gather(steps, "bruck", [[r] for r in range(n)])
