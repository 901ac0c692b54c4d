"""Core lending: waiting pipeline ranks lend their CPU cores to ranks that compute. Derives the threads of each compute from a program.

While a pipeline fills and drains some of its ranks wait, and on CPUs their cores can do the others' work meanwhile (Garcia, Corbalan and
Labarta 2009, "LeWI": lend when idle). Which ranks wait is derived from the program and the stages' relative work, not from a clock, so that
every run gives an operator as many threads and its sums are the same. Not modelled: transfers, copies to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.plan.ir.program import Compute, ComputeOp, Program, Recv, Send, Value, order_actions

__all__ = ["concurrent_ranks", "threads_per_rank"]

# Work in units of a stage's forward: the gradient of a product is two products.
WORK_OF_OP = {ComputeOp.F: 1.0, ComputeOp.R: 1.0, ComputeOp.B: 2.0, ComputeOp.I: 1.0, ComputeOp.W: 1.0}
MIN_OVERLAP = 0.05  # of a compute, at least, that another overlaps to count as concurrent


def concurrent_ranks(
    program: Program, work: Sequence[float], sizes: Mapping[int, float] | None = None
) -> tuple[dict[int, frozenset[int]], ...]:
    """Return [rank][step of a compute] -> the other ranks that compute at some time of it.

    Args:
        work: of a stage's forward, in any unit. sizes: of the microbatches against one another, where they are unequal.

    Raises:
        ProgramError: the program cannot run to its end.

    >>> from shardwise.schedules import build
    >>> [sorted(other for other in row.values()) for row in concurrent_ranks(build("sequential", 2, 1), (1.0, 1.0))]
    [[frozenset(), frozenset()], [frozenset(), frozenset()]]
    """
    clock = [0.0] * program.num_ranks
    steps = [0] * program.num_ranks
    arrived: dict[tuple[int, int, Value], float] = {}
    spans: list[dict[int, tuple[float, float]]] = [{} for _ in clock]
    for rank, action in order_actions(program):
        step, now = steps[rank], clock[rank]
        steps[rank] += 1
        if isinstance(action, Send):
            arrived[rank, action.to, action.value] = now
        elif isinstance(action, Recv):
            clock[rank] = max(now, arrived[action.source, rank, action.value])
        elif isinstance(action, Compute):
            clock[rank] = now + WORK_OF_OP[action.op] * work[action.stage] * (sizes[action.microbatch] if sizes else 1.0)
            spans[rank][step] = now, clock[rank]
    by_rank: list[dict[int, frozenset[int]]] = []
    for rank, row in enumerate(spans):
        other_spans = {r: sorted(other.values()) for r, other in enumerate(spans) if r != rank}
        first = dict.fromkeys(other_spans, 0)
        by_step: dict[int, frozenset[int]] = {}
        for step, (start, end) in row.items():
            margin = MIN_OVERLAP * (end - start)
            overlapping = set()
            for r, times in other_spans.items():
                while first[r] < len(times) and times[first[r]][1] <= start + margin:
                    first[r] += 1
                if first[r] < len(times) and times[first[r]][0] < end - margin:
                    overlapping.add(r)
            by_step[step] = frozenset(overlapping)
        by_rank.append(by_step)
    return tuple(by_rank)


def threads_per_rank(num_computing: int, rank_threads: int, num_pipeline_ranks: int, num_cores: int) -> int:
    """Number of threads of a rank while `num_computing` ranks of its pipeline compute on its host, itself among them.

    Args:
        rank_threads: threads of each of them. positions: ranks of the pipeline on the host. num_cores: of the host, for this pipeline.

    >>> [threads_per_rank(ranks, 2, 4, 8) for ranks in (1, 2, 3, 4)], threads_per_rank(1, 1, 4, 2)
    ([8, 4, 2, 2], 2)
    """
    return max(rank_threads, min(rank_threads * num_pipeline_ranks, num_cores) // num_computing)
