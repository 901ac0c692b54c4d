"""Everyone sends everything to everyone: one step, and as many bytes as can be. In: numbers of ranks. Out: programs."""

from __future__ import annotations

from weft.collectives import steps as spec
from weft.collectives.steps import Move, Steps, chunks
from weft.plan.program import Program


def all_reduce(num_ranks: int) -> Program:
    """n-1 messages of M from each rank, n(n-1)M in all; nothing waits for anything but its own messages.

    >>> from weft.plan.check import check
    >>> check(all_reduce(4))
    """
    steps = Steps(num_ranks)
    steps.together(Move(r, (r + k) % num_ranks, chunks([0]), add=True) for k in range(1, num_ranks) for r in range(num_ranks))
    return spec.all_reduce(steps, "naive", 1)


def reduce_scatter(num_ranks: int) -> Program:
    """Each piece straight to the rank that keeps it: n-1 messages of M/n from each rank."""
    steps = Steps(num_ranks)
    for k in range(1, num_ranks):
        steps.together(Move(r, (r + k) % num_ranks, chunks([(r + k) % num_ranks]), add=True) for r in range(num_ranks))
    return spec.reduce_scatter(steps, "naive", [[r] for r in range(num_ranks)])


def all_gather(num_ranks: int) -> Program:
    """Each piece straight to all: n-1 messages of M/n from each rank."""
    steps = Steps(num_ranks)
    for k in range(1, num_ranks):
        steps.together(Move(r, (r + k) % num_ranks, chunks([r])) for r in range(num_ranks))
    return spec.all_gather(steps, "naive", [[r] for r in range(num_ranks)])


def broadcast(num_ranks: int) -> Program:
    """Rank 0 sends M to each of the others."""
    steps = Steps(num_ranks)
    steps.together(Move(0, r, chunks([0])) for r in range(1, num_ranks))
    return spec.broadcast(steps, "naive", 1, 0)
