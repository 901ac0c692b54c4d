"""Orders by a greedy list: whenever a rank is free it takes what it prefers of what is ready, every compute taking one unit of time.

In: which stage of which microbatches each rank has, what it prefers, how much it may hold. Out: the computes of each rank in
order. The order is legal on any links, since it is legal on the chain. Not modelled: true times; a transfer takes none.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.errors import ProgramError
from weft.plan.program import Compute, Op


@dataclass(frozen=True, slots=True)
class Place:
    """A stage on one rank, and the microbatches of it that run there, in their order."""

    stage: int
    microbatches: Sequence[int]


Prefer = Callable[[Compute], tuple[int, ...]]  # smallest first
Room = Callable[[Place, int, int], bool]  # a place, what it holds, what its rank holds -> whether one more forward may run


def listed(places: Sequence[Sequence[Place]], num_stages: int, prefer: Prefer, room: Room, split: bool) -> list[list[Compute]]:
    """[rank] -> its computes in order; `places`: [rank] -> its places; `split`: I and W instead of B.

    >>> rows = listed([[Place(0, [0, 1])], [Place(1, [0, 1])]], 2, lambda a: (a.op is Op.F,), lambda place, held, of_rank: True, False)
    >>> [" ".join(map(str, row)) for row in rows]
    ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']

    Raises:
        ProgramError: no rank may take anything more, since `room` admits too little.
    """
    tasks = _Tasks(places, num_stages, split)
    rows: list[list[Compute]] = [[] for _ in places]
    free = [0] * len(places)
    wake = [(0, rank) for rank in range(len(places))]
    left = sum(len(place.microbatches) for rank in places for place in rank) * (3 if split else 2)
    while wake:
        now, rank = heapq.heappop(wake)
        if now < free[rank]:
            continue
        ready = [a for a in tasks.candidates(rank, room) if tasks.ready[a] <= now]
        if ready:
            chosen = min(ready, key=prefer)
            rows[rank].append(chosen)
            free[rank] = now + 1
            left -= 1
            for other in {rank, *tasks.done(rank, chosen, now + 1)}:
                heapq.heappush(wake, (now + 1, other))
    if left:
        raise ProgramError(f"{left} computes have no room to run; a rank must be able to hold a forward of every stage that it has")
    return rows


class _Tasks:
    """What may run next: microbatches of a place run in their order, each op after what it waits for."""

    def __init__(self, places: Sequence[Sequence[Place]], num_stages: int, split: bool) -> None:
        self.places, self.num_stages, self.split = places, num_stages, split
        self.back = Op.I if split else Op.B
        self.home = {(place.stage, m): rank for rank, here in enumerate(places) for place in here for m in place.microbatches}
        self.next = {(rank, i, op): 0 for rank, here in enumerate(places) for i in range(len(here)) for op in Op}
        self.held = {(rank, i): 0 for rank, here in enumerate(places) for i in range(len(here))}
        self.index = {(place.stage, m): i for here in places for i, place in enumerate(here) for m in place.microbatches}
        self.ready = {Compute(Op.F, 0, m): 0 for here in places for place in here if place.stage == 0 for m in place.microbatches}

    def candidates(self, rank: int, room: Room) -> Iterator[Compute]:
        """The next of every kind at every place, if it waits for nothing that is not yet placed."""
        of_rank = sum(self.held[rank, i] for i in range(len(self.places[rank])))
        for i, place in enumerate(self.places[rank]):
            for op in (Op.F, self.back, Op.W):
                at = self.next[rank, i, op]
                if at < len(place.microbatches) and (op is not Op.F or room(place, self.held[rank, i], of_rank)):
                    action = Compute(op, place.stage, place.microbatches[at])
                    if action in self.ready:
                        yield action

    def done(self, rank: int, action: Compute, at: int) -> set[int]:
        """Note an action that ends at `at`; the ranks that may run something by it."""
        stage, m = action.stage, action.microbatch
        i = self.index[stage, m]
        self.next[rank, i, action.op] += 1
        self.held[rank, i] += {Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0)
        following = []
        if action.op is Op.F:
            following.append(Compute(Op.F, stage + 1, m) if stage + 1 < self.num_stages else Compute(self.back, stage, m))
        elif action.op is self.back:
            following += [Compute(self.back, stage - 1, m)] if stage else []
            following += [Compute(Op.W, stage, m)] if self.split else []
        self.ready.update(dict.fromkeys(following, at))
        return {self.home[a.stage, a.microbatch] for a in following}
