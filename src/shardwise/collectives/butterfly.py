"""Butterfly all-reduce: in step k a rank exchanges with the one whose number differs in bit k. In: numbers of ranks. Out: programs.

Recursive doubling, the butterfly all-reduce of textbooks, exchanges the whole tensor: n M log2 n bytes in all. Recursive halving and
doubling halves it (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005). For other
numbers than powers of two, the ranks beyond the power of two are folded into the first ones, which send them the result at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.collectives import steps as spec
from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder, chunk_values
from shardwise.errors import UsageError
from shardwise.plan.ir.program import Program, Value


def largest_power_of_two(num_ranks: int) -> int:
    """Return the largest power of two that is at most `num_ranks`.

    >>> [largest_power_of_two(n) for n in (1, 3, 4, 33)]
    [1, 2, 4, 32]
    """
    return 1 << (num_ranks.bit_length() - 1) if num_ranks > 0 else 0


def recursive_doubling(num_ranks: int) -> Program:
    """Return the all-reduce of log2 n steps of M, which has the least latency.

    >>> from shardwise.plan.ir.check import check
    >>> check(recursive_doubling(8)), check(recursive_doubling(6))
    (None, None)
    """
    steps = CollectiveBuilder(num_ranks)
    core = largest_power_of_two(num_ranks)
    _fold_in(steps, core, [0])
    distance = 1
    while distance < core:
        steps.add_step(ChunkTransfer(r, r ^ distance, chunk_values([0]), add=True) for r in range(core))
        distance *= 2
    _fold_out(steps, core, [0])
    return spec.all_reduce_program(steps, "recursive_doubling", 1)


def halving_doubling(num_ranks: int) -> Program:
    """Return the all-reduce of 2·log2 n steps, 2M(n-1)/n a rank: a ring's bytes with a tree's latency, but between distant ranks.

    >>> from shardwise.plan.ir.check import check
    >>> check(halving_doubling(8)), check(halving_doubling(11))
    (None, None)
    """
    steps = CollectiveBuilder(num_ranks)
    core = largest_power_of_two(num_ranks)
    _fold_in(steps, core, range(core))
    add_halving_steps(steps, range(core), [[c] for c in range(core)])
    add_doubling_steps(steps, range(core), [[c] for c in range(core)])
    _fold_out(steps, core, range(core))
    return spec.all_reduce_program(steps, "halving_doubling", core)


def reduce_scatter(num_ranks: int) -> Program:
    """Return the reduce-scatter of log2 n steps of M/2, M/4, ...

    Raises:
        UsageError: not a power of two.
    """
    steps, parts = CollectiveBuilder(num_ranks), [[c] for c in range(num_ranks)]
    add_halving_steps(steps, range(num_ranks), parts)
    return spec.reduce_scatter_program(steps, "halving", parts)


def all_gather(num_ranks: int) -> Program:
    """Return the all-gather of log2 n steps of M/n, 2M/n, ...

    Raises:
        UsageError: not a power of two.
    """
    steps, parts = CollectiveBuilder(num_ranks), [[c] for c in range(num_ranks)]
    add_doubling_steps(steps, range(num_ranks), parts)
    return spec.all_gather_program(steps, "doubling", parts)


def add_halving_steps(steps: CollectiveBuilder, ranks: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
    """Add the steps that reduce `parts[i]` onto `ranks[i]`: each sends its partner the partner's half of the remaining chunks."""
    _check_power_of_two(ranks)
    distance = len(ranks) // 2
    while distance:
        steps.add_step(
            ChunkTransfer(ranks[i], ranks[i ^ distance], _aligned_group_chunks(parts, i ^ distance, distance), add=True)
            for i in range(len(ranks))
        )
        distance //= 2


def add_doubling_steps(steps: CollectiveBuilder, ranks: Sequence[int], parts: Sequence[Sequence[int]]) -> None:
    """Add the steps that gather `parts[i]` of `ranks[i]` on all ranks: each sends all chunks that it has."""
    _check_power_of_two(ranks)
    distance = 1
    while distance < len(ranks):
        steps.add_step(ChunkTransfer(ranks[i], ranks[i ^ distance], _aligned_group_chunks(parts, i, distance)) for i in range(len(ranks)))
        distance *= 2


def _aligned_group_chunks(parts: Sequence[Sequence[int]], index: int, width: int) -> tuple[Value, ...]:
    """Return the chunks of the aligned group of `width` positions that contains `index`."""
    start = index // width * width
    return chunk_values(c for part in parts[start : start + width] for c in part)


def _check_power_of_two(ranks: Sequence[int]) -> None:
    if len(ranks) != largest_power_of_two(len(ranks)):
        raise UsageError(f"recursive halving and doubling of {len(ranks)} ranks; it needs a power of two, so use ring")


def _fold_in(steps: CollectiveBuilder, core: int, indices: Sequence[int]) -> None:
    steps.add_step(ChunkTransfer(r, r - core, chunk_values(indices), add=True) for r in range(core, steps.num_ranks))


def _fold_out(steps: CollectiveBuilder, core: int, indices: Sequence[int]) -> None:
    steps.add_step(ChunkTransfer(r - core, r, chunk_values(indices)) for r in range(core, steps.num_ranks))
