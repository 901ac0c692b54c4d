"""Hierarchical all-reduce over nested levels: inside a host, between hosts, and so on. In: sizes of the levels. Out: a program.

Every rank of a host reduces its own shard between hosts, so that all network rails of a host are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from shardwise.collectives import ring
from shardwise.collectives import steps as spec
from shardwise.collectives.steps import CollectiveBuilder
from shardwise.errors import UsageError
from shardwise.plan.ir.program import Program


def all_reduce(sizes: Sequence[int]) -> Program:
    """Return the hierarchical all-reduce; `sizes`: ranks of a host, hosts of a rack, ..., innermost first; neighbours share a host.

    A ring reduce-scatter inside the host, an all-reduce of each rank's shard with its peers in the other hosts, a ring all-gather. Between
    hosts go 2M(b-1)/(k·b) a rank, of b hosts of k ranks, with 2(k-1) latencies inside hosts and 2(b-1) between them.

    >>> from shardwise.plan.ir.check import check
    >>> check(all_reduce([4, 2])), check(all_reduce([3, 2, 2]))
    (None, None)

    Raises:
        UsageError: a level without ranks.
    """
    if not sizes or min(sizes) < 1:
        raise UsageError(f"levels of {', '.join(map(str, sizes)) or 'no'} ranks; every level needs 1 or more")
    steps = CollectiveBuilder(prod(sizes))
    _add_level_steps(steps, list(range(steps.num_ranks)), list(range(steps.num_ranks)), list(sizes))
    return spec.all_reduce_program(steps, "hierarchical", steps.num_ranks)


def _add_level_steps(steps: CollectiveBuilder, ranks: list[int], indices: list[int], sizes: list[int]) -> None:
    """Add the steps that all-reduce the chunks `indices` over `ranks`, of which sizes[0] neighbours share a host."""
    width, outer_sizes = sizes[0], sizes[1:]
    count = len(indices) // width
    parts = [indices[i * count : (i + 1) * count] for i in range(width)]
    hosts = [ranks[i : i + width] for i in range(0, len(ranks), width)]
    for host in hosts:
        ring.add_reduce_scatter_steps(steps, host, parts)
    if outer_sizes:
        for i in range(width):
            _add_level_steps(steps, [host[i] for host in hosts], parts[i], outer_sizes)
    for host in hosts:
        ring.add_all_gather_steps(steps, host, parts)
