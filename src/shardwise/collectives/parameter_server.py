"""Parameter-server all-reduce (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014).

In: numbers of ranks and of servers, which are ranks too. Out: the program of one synchronous exchange.
"""

from __future__ import annotations

from shardwise.collectives import steps as spec
from shardwise.collectives.steps import ChunkTransfer, CollectiveBuilder, chunk_values
from shardwise.errors import UsageError
from shardwise.plan.ir.program import Program


def all_reduce(num_ranks: int, servers: int = 1) -> Program:
    """Return the exchange in which workers push, servers reduce and workers pull: 2M(n-1) in all.

    Ranks 0 to `servers` - 1 are the servers, M/servers of the keys each. A server carries 2M(n-1)/servers: many workers need several.

    >>> from shardwise.plan.ir.check import check
    >>> check(all_reduce(4)), check(all_reduce(5, servers=3))
    (None, None)

    Raises:
        UsageError: more servers than ranks, or none.
    """
    if not 1 <= servers <= num_ranks:
        raise UsageError(f"{servers} servers among {num_ranks} ranks; use 1 to {num_ranks}")
    steps = CollectiveBuilder(num_ranks)
    pairs = [(server, (server + k) % num_ranks) for k in range(1, num_ranks) for server in range(servers)]
    steps.add_step(ChunkTransfer(worker, server, chunk_values([server]), add=True) for server, worker in pairs)
    steps.add_step(ChunkTransfer(server, worker, chunk_values([server])) for server, worker in pairs)
    return spec.all_reduce_program(steps, "parameter_server", servers)
