"""Naive collectives: every rank sends directly to every other, in one step with the most bytes. In: numbers of ranks. Out: programs."""

from __future__ import annotations

from weft.collectives import steps as spec
from weft.collectives.steps import Move, Steps, chunks
from weft.plan.program import Program


def all_reduce(num_ranks: int) -> Program:
    """Return the all-reduce of n-1 messages of M from each rank, n(n-1)M in all; no message depends on another.

    >>> from weft.plan.check import check
    >>> check(all_reduce(4))
    """
    steps = Steps(num_ranks)
    steps.together(Move(r, (r + k) % num_ranks, chunks([0]), add=True) for k in range(1, num_ranks) for r in range(num_ranks))
    return spec.all_reduce(steps, "naive", 1)


def reduce_scatter(num_ranks: int) -> Program:
    """Return the reduce-scatter that sends each chunk to its final rank: n-1 messages of M/n from each rank."""
    steps = Steps(num_ranks)
    for k in range(1, num_ranks):
        steps.together(Move(r, (r + k) % num_ranks, chunks([(r + k) % num_ranks]), add=True) for r in range(num_ranks))
    return spec.reduce_scatter(steps, "naive", [[r] for r in range(num_ranks)])


def all_gather(num_ranks: int) -> Program:
    """Return the all-gather that sends each chunk directly to all: n-1 messages of M/n from each rank."""
    steps = Steps(num_ranks)
    for k in range(1, num_ranks):
        steps.together(Move(r, (r + k) % num_ranks, chunks([r])) for r in range(num_ranks))
    return spec.all_gather(steps, "naive", [[r] for r in range(num_ranks)])


def broadcast(num_ranks: int) -> Program:
    """Return the broadcast in which rank 0 sends M to each other rank."""
    steps = Steps(num_ranks)
    steps.together(Move(0, r, chunks([0])) for r in range(1, num_ranks))
    return spec.broadcast(steps, "naive", 1, 0)
