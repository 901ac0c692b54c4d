"""All-to-all: `block(s,t)` goes from rank s to rank t. In: numbers of ranks. Out: programs, direct or in two levels."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder
from shardwise.errors import UsageError
from shardwise.plan.ir.program import HeldValues, Program, Value


def block_value(source: int, target: int) -> Value:
    """Return the value that rank `source` sends to rank `target`."""
    return Value("block", (source, target))


def direct_exchange(num_ranks: int) -> Program:
    """Return the direct all-to-all of n-1 steps; in step k every rank sends to the k-th after it.

    >>> from shardwise.plan.ir.check import check
    >>> check(direct_exchange(5))
    """
    steps = CollectiveBuilder(num_ranks)
    for k in range(1, num_ranks):
        steps.add_step(ChunkTransfer(r, (r + k) % num_ranks, (block_value(r, (r + k) % num_ranks),)) for r in range(num_ranks))
    return _all_to_all_program(steps, "direct")


def two_level(sizes: Sequence[int]) -> Program:
    """Return the two-level all-to-all: inside a host to the rank with the target's local index, then between hosts.

    k + b - 2 messages instead of k·b - 1, for `sizes` (k ranks a host, b hosts). Messages between two hosts are k times as large.

    >>> from shardwise.plan.ir.check import check
    >>> check(two_level([4, 3]))

    Raises:
        UsageError: not two levels.
    """
    if len(sizes) != 2 or min(sizes) < 1:
        raise UsageError(f"two levels of 1 rank or more are needed, not {', '.join(map(str, sizes))}")
    width, hosts = sizes
    n = width * hosts
    steps = CollectiveBuilder(n)
    for k in range(1, width):
        moves = []
        for r in range(n):
            host, local_rank = divmod(r, width)
            target = (local_rank + k) % width
            moves.append(ChunkTransfer(r, host * width + target, tuple(block_value(r, b * width + target) for b in range(hosts))))
        steps.add_step(moves)
    for k in range(1, hosts):
        moves = []
        for r in range(n):
            host, local_rank = divmod(r, width)
            target_rank = (host + k) % hosts * width + local_rank
            moves.append(ChunkTransfer(r, target_rank, tuple(block_value(host * width + s, target_rank) for s in range(width))))
        steps.add_step(moves)
    return _all_to_all_program(steps, "two_level")


def _all_to_all_program(steps: CollectiveBuilder, name: str) -> Program:
    n = steps.num_ranks
    initial: list[HeldValues] = [{block_value(r, t): {r: 1} for t in range(n)} for r in range(n)]
    wants: list[HeldValues] = [{block_value(s, r): {s: 1} for s in range(n)} for r in range(n)]
    return steps.program(name, initial, wants)
