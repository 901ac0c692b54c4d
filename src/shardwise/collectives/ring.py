"""Ring collectives: every rank sends chunks of 1/n to the next rank. In: numbers of ranks. Out: programs, and their steps over any ranks.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.collectives import steps as spec
from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder, chunk_values
from shardwise.plan.ir.program import Program

ChunksByPosition = Sequence[Sequence[int]]  # [position in the ring] -> the chunks that it ends, or begins, with


def add_reduce_scatter_steps(steps: CollectiveBuilder, ranks: Sequence[int], parts: ChunksByPosition) -> None:
    """Add the len(ranks) - 1 steps that reduce-scatter: the sum of `parts[i]` over `ranks` ends on `ranks[i]`."""
    n = len(ranks)
    for step in range(1, n):
        steps.add_step(ChunkTransfer(ranks[i], ranks[(i + 1) % n], chunk_values(parts[(i - step) % n]), add=True) for i in range(n))


def add_all_gather_steps(steps: CollectiveBuilder, ranks: Sequence[int], parts: ChunksByPosition) -> None:
    """Add the len(ranks) - 1 steps that all-gather `parts[i]` of `ranks[i]` on all of `ranks`."""
    n = len(ranks)
    for step in range(n - 1):
        steps.add_step(ChunkTransfer(ranks[i], ranks[(i + 1) % n], chunk_values(parts[(i - step) % n])) for i in range(n))


def all_reduce(num_ranks: int) -> Program:
    """Return the all-reduce of 2(n-1) steps of M/n: 2M(n-1)/n a rank, which is optimal, with 2(n-1) latencies.

    >>> from shardwise.plan.ir.check import check
    >>> check(all_reduce(5))
    """
    steps, ranks, parts = CollectiveBuilder(num_ranks), range(num_ranks), [[c] for c in range(num_ranks)]
    add_reduce_scatter_steps(steps, ranks, parts)
    add_all_gather_steps(steps, ranks, parts)
    return spec.all_reduce_program(steps, "ring", num_ranks)


def reduce_scatter(num_ranks: int) -> Program:
    """Return the reduce-scatter of n-1 steps of M/n."""
    steps, parts = CollectiveBuilder(num_ranks), [[c] for c in range(num_ranks)]
    add_reduce_scatter_steps(steps, range(num_ranks), parts)
    return spec.reduce_scatter_program(steps, "ring", parts)


def all_gather(num_ranks: int) -> Program:
    """Return the all-gather of n-1 steps of M/n."""
    steps, parts = CollectiveBuilder(num_ranks), [[c] for c in range(num_ranks)]
    add_all_gather_steps(steps, range(num_ranks), parts)
    return spec.all_gather_program(steps, "ring", parts)


def broadcast(num_ranks: int, pieces: int = 8) -> Program:
    """Return the pipelined chain from rank 0: n - 2 + `pieces` steps of M/`pieces`."""
    steps = CollectiveBuilder(num_ranks)
    for step in range(num_ranks - 2 + pieces):
        steps.add_step(ChunkTransfer(r, r + 1, chunk_values([step - r])) for r in range(num_ranks - 1) if 0 <= step - r < pieces)
    return spec.broadcast_program(steps, "ring", pieces, 0)
