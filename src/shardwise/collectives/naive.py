"""Naive collectives: every rank sends directly to every other, in one step with the most bytes. In: numbers of ranks. Out: programs."""

from __future__ import annotations

from shardwise.collectives import steps as spec
from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder, chunk_values
from shardwise.plan.ir.program import Program


def all_reduce(num_ranks: int) -> Program:
    """Return the all-reduce of n-1 messages of M from each rank, n(n-1)M in all; no message depends on another.

    >>> from shardwise.plan.ir.check import check
    >>> check(all_reduce(4))
    """
    steps = CollectiveBuilder(num_ranks)
    steps.add_step(
        ChunkTransfer(r, (r + k) % num_ranks, chunk_values([0]), add=True) for k in range(1, num_ranks) for r in range(num_ranks)
    )
    return spec.all_reduce_program(steps, "naive", 1)


def reduce_scatter(num_ranks: int) -> Program:
    """Return the reduce-scatter that sends each chunk to its final rank: n-1 messages of M/n from each rank."""
    steps = CollectiveBuilder(num_ranks)
    for k in range(1, num_ranks):
        steps.add_step(ChunkTransfer(r, (r + k) % num_ranks, chunk_values([(r + k) % num_ranks]), add=True) for r in range(num_ranks))
    return spec.reduce_scatter_program(steps, "naive", [[r] for r in range(num_ranks)])


def all_gather(num_ranks: int) -> Program:
    """Return the all-gather that sends each chunk directly to all: n-1 messages of M/n from each rank."""
    steps = CollectiveBuilder(num_ranks)
    for k in range(1, num_ranks):
        steps.add_step(ChunkTransfer(r, (r + k) % num_ranks, chunk_values([r])) for r in range(num_ranks))
    return spec.all_gather_program(steps, "naive", [[r] for r in range(num_ranks)])


def broadcast(num_ranks: int) -> Program:
    """Return the broadcast in which rank 0 sends M to each other rank."""
    steps = CollectiveBuilder(num_ranks)
    steps.add_step(ChunkTransfer(0, r, chunk_values([0])) for r in range(1, num_ranks))
    return spec.broadcast_program(steps, "naive", 1, 0)
