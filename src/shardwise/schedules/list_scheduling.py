"""Greedy list scheduling: a rank that is free runs its ready compute of highest priority; every compute takes one unit of time.

In: the stages and microbatches of each rank, priorities, memory limits. Out: the computes of each rank in order. The order is
legal on any links, since it is legal on the chain. Not modelled: real times; transfers take none.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Compute, ComputeOp


@dataclass(frozen=True, slots=True)
class StageMicrobatches:
    """A stage on one rank, and its microbatches that run there, in order."""

    stage: int
    microbatches: Sequence[int]


Priority = Callable[[Compute], tuple[int, ...]]  # smallest first
MemoryLimit = Callable[
    [StageMicrobatches, int, int], bool
]  # a place, microbatches in flight there, those of its rank -> may one more forward run?


def list_schedule(
    places: Sequence[Sequence[StageMicrobatches]], num_stages: int, priority: Priority, has_memory: MemoryLimit, splits_backward: bool
) -> list[list[Compute]]:
    """Return [rank] -> its computes in order; `places`: [rank] -> its places; `splits_backward`: I and W instead of B.

    >>> rows = list_schedule([[StageMicrobatches(0, [0, 1])], [StageMicrobatches(1, [0, 1])]], 2, lambda a: (a.op is ComputeOp.F,), lambda *place_and_counts: True, False)
    >>> [" ".join(map(str, row)) for row in rows]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']

    Raises:
        ProgramError: no rank may run anything, since `has_memory` admits too little.
    """  # noqa: E501
    tasks = _TaskGraph(places, num_stages, splits_backward)
    rows: list[list[Compute]] = [[] for _ in places]
    free_at = [0] * len(places)
    wake = [(0, rank) for rank in range(len(places))]
    num_remaining = sum(len(place.microbatches) for rank in places for place in rank) * (3 if splits_backward else 2)
    while wake:
        now, rank = heapq.heappop(wake)
        if now < free_at[rank]:
            continue
        ready = [a for a in tasks.candidates(rank, has_memory) if tasks.ready_at[a] <= now]
        if ready:
            chosen = min(ready, key=priority)
            rows[rank].append(chosen)
            free_at[rank] = now + 1
            num_remaining -= 1
            for woken in {rank, *tasks.complete(rank, chosen, now + 1)}:
                heapq.heappush(wake, (now + 1, woken))
    if num_remaining:
        raise ProgramError(f"{num_remaining} computes have no memory to run; a rank must be able to hold a forward of each of its stages")
    return rows


class _TaskGraph:
    """The computes that may run next: microbatches of a place run in order, each op after its dependencies."""

    def __init__(self, places: Sequence[Sequence[StageMicrobatches]], num_stages: int, split: bool) -> None:
        self.places, self.num_stages, self.splits_backward = places, num_stages, split
        self.backward_op = ComputeOp.I if split else ComputeOp.B
        self.rank_of = {(place.stage, m): rank for rank, row in enumerate(places) for place in row for m in place.microbatches}
        self.next_index = {(rank, i, op): 0 for rank, row in enumerate(places) for i in range(len(row)) for op in ComputeOp}
        self.num_in_flight = {(rank, i): 0 for rank, row in enumerate(places) for i in range(len(row))}
        self.index = {(place.stage, m): i for row in places for i, place in enumerate(row) for m in place.microbatches}
        self.ready_at = {Compute(ComputeOp.F, 0, m): 0 for row in places for place in row if place.stage == 0 for m in place.microbatches}

    def candidates(self, rank: int, has_memory: MemoryLimit) -> Iterator[Compute]:
        """Yield the next compute of every kind at every place, if its dependencies are scheduled."""
        num_on_rank = sum(self.num_in_flight[rank, i] for i in range(len(self.places[rank])))
        for i, place in enumerate(self.places[rank]):
            for op in (ComputeOp.F, self.backward_op, ComputeOp.W):
                position = self.next_index[rank, i, op]
                if position < len(place.microbatches) and (
                    op is not ComputeOp.F or has_memory(place, self.num_in_flight[rank, i], num_on_rank)
                ):
                    action = Compute(op, place.stage, place.microbatches[position])
                    if action in self.ready_at:
                        yield action

    def complete(self, rank: int, action: Compute, at: int) -> set[int]:
        """Record an action that ends at time `at`; return the ranks of the computes that it makes ready."""
        stage, m = action.stage, action.microbatch
        i = self.index[stage, m]
        self.next_index[rank, i, action.op] += 1
        self.num_in_flight[rank, i] += {ComputeOp.F: 1, ComputeOp.B: -1, ComputeOp.W: -1}.get(action.op, 0)
        following = []
        if action.op is ComputeOp.F:
            following.append(Compute(ComputeOp.F, stage + 1, m) if stage + 1 < self.num_stages else Compute(self.backward_op, stage, m))
        elif action.op is self.backward_op:
            following += [Compute(self.backward_op, stage - 1, m)] if stage else []
            following += [Compute(ComputeOp.W, stage, m)] if self.splits_backward else []
        self.ready_at.update(dict.fromkeys(following, at))
        return {self.rank_of[a.stage, a.microbatch] for a in following}
