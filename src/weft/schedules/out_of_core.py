"""Several stages on one rank, whose activations do not all fit: microbatch after microbatch, some stages moved to the host, some dropped.

In: sizes, and what happens to each stage between its forward and its backward. Out: a `Program` of one rank. Not modelled: which stages;
`weft.solve.residency` chooses.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.plan.program import Compute, Links, Op, Program
from weft.schedules.lower import offload, pipeline, recompute


def out_of_core(
    num_stages: int,
    num_microbatches: int,
    links: Links | None = None,
    swapped: Collection[int] = (),
    dropped: Collection[int] = (),
    ahead: int = 1,
) -> Program:
    """All stages forward, then all backward, one microbatch after the other.

    Args:
        swapped: stages whose activations go to the host, and come back `ahead` computes before they are read.
        dropped: stages that run again before their backward.

    >>> print(*out_of_core(3, 1, swapped={0}, dropped={1}).actions[0])
    0F0 0OFFLOAD0 1F0 1DROP0 2F0 2B0 1R0 0LOAD0 1B0 0B0
    """
    row = []
    for m in range(num_microbatches):
        row += [Compute(Op.F, s, m) for s in range(num_stages)]
        row += [Compute(Op.B, s, m) for s in reversed(range(num_stages))]
    program = pipeline("out-of-core", [row], links)
    program = recompute(program, {(s, m) for s in dropped for m in range(num_microbatches)})
    return offload(program, {(s, m) for s in swapped for m in range(num_microbatches)}, ahead)
