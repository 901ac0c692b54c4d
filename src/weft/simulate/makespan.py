"""How long a pipeline takes, and nothing else. In: the computes of each rank in order, seconds by stage and by link. Out: seconds.

The same times as `weft.simulate.clock` gives the program that `weft.schedules.lower` makes of these computes, where a send is posted, in a
fiftieth of the time: for searches that time many programs. A stage may be on several ranks, each microbatch of it on one. Not
modelled: what the clock does not model, sends that wait, and the exchange of gradients between a stage's ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.errors import ProgramError
from weft.plan.program import Compute, Links, Op


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one microbatch.

    `forward_s`, `backward_s`: by stage; B is the whole backward, R takes as long as F. `transfer_s`: by link (producer, consumer), the same
    both ways; 0 where it is missing. `weight_s`: by stage, of W, which is the rest of B after I; half of B where it is not given.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    transfer_s: Mapping[tuple[int, int], float]
    weight_s: Sequence[float] | None = None

    def of(self) -> dict[Op, Sequence[float]]:
        """By stage, of every operation."""
        weight_s = [b / 2 for b in self.backward_s] if self.weight_s is None else self.weight_s
        input_s = [b - w for b, w in zip(self.backward_s, weight_s, strict=True)]
        return {Op.F: self.forward_s, Op.B: self.backward_s, Op.I: input_s, Op.W: weight_s, Op.R: self.forward_s}


def makespan_s(rows: Sequence[Sequence[Compute]], links: Links, times: Times, others: tuple[int, Times] | None = None) -> float:
    """Seconds until the last compute and the last transfer have ended.

    Args:
        rows: [rank] -> its computes, in order.
        others: the microbatch from which on it is other times, of microbatches of another size.

    >>> from weft.schedules import SCHEDULES
    >>> gpipe, ones = SCHEDULES["gpipe"](3, 3, ((0, 1), (1, 2))), Times([1.0] * 3, [1.0] * 3, {})
    >>> makespan_s(gpipe, ((0, 1), (1, 2)), ones), makespan_s(gpipe, ((0, 1), (1, 2)), ones, (2, Times([0.5] * 3, [0.5] * 3, {})))
    (10.0, 9.0)

    Raises:
        ProgramError: no rank can move, or a microbatch of a stage on several ranks.
    """
    num_stages = len(times.forward_s)
    before: list[list[int]] = [[] for _ in range(num_stages)]
    after: list[list[int]] = [[] for _ in range(num_stages)]
    for source, target in links:
        before[target].append(source)
        after[source].append(target)
    home = _homes(rows, num_stages)
    # What a compute sends, and how long it takes: the nearest reader's first, as the program has it.
    alone: list[list[int]] = [[]] * num_stages
    waits = {Op.F: before, Op.B: after, Op.I: after, Op.W: alone, Op.R: alone}
    first, rest = others if others is not None else (1 << 62, times)
    usual, unusual = ((one.of(), _sends(before, after, one.transfer_s)) for one in (times, rest))
    arrived: dict[tuple[int, int, int], float] = {}  # (from stage, to stage, microbatch) -> when
    waiting: dict[tuple[int, int, int], int] = {}
    free: dict[tuple[int, int], float] = {}
    clock = [0.0] * len(rows)
    at = [0] * len(rows)
    end = 0.0
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row, now, step = rows[rank], clock[rank], at[rank]
        while step < len(row):
            action = row[step]
            s, m = action.stage, action.microbatch
            blocked = False
            seconds, sends = usual if m < first else unusual
            for q in waits[action.op][s]:
                when = arrived.get((q, s, m))
                if when is None:
                    waiting[q, s, m] = rank
                    blocked = True
                    break
                if when > now:
                    now = when
            if blocked:
                break
            now += seconds[action.op][s]
            for q, takes in sends[action.op][s]:
                when, to = now, home[q].get(m, rank)
                if to != rank:
                    when = max(now, free.get((rank, to), 0.0)) + takes
                    free[rank, to] = when
                    end = max(end, when)
                arrived[s, q, m] = when
                if (s, q, m) in waiting:
                    ready.append(waiting.pop((s, q, m)))
            step += 1
        clock[rank], at[rank] = now, step
    if any(step < len(row) for step, row in zip(at, rows, strict=True)):
        raise ProgramError("no rank can move; the order of the computes is not legal")
    return max(end, *clock) if clock else 0.0


def _sends(
    before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], transfer_s: Mapping[tuple[int, int], float]
) -> dict[Op, list[list[tuple[int, float]]]]:
    """By operation and stage: to which stages it sends, and how long that takes."""
    stages = range(len(before))
    down = [[(q, transfer_s.get((s, q), 0.0)) for q in sorted(after[s], key=lambda q: q - s)] for s in stages]
    up = [[(q, transfer_s.get((q, s), 0.0)) for q in sorted(before[s], key=lambda q: s - q)] for s in stages]
    nothing: list[list[tuple[int, float]]] = [[] for _ in stages]
    return {Op.F: down, Op.B: up, Op.I: up, Op.W: nothing, Op.R: nothing}


def _homes(rows: Sequence[Sequence[Compute]], num_stages: int) -> list[dict[int, int]]:
    """[stage] -> {microbatch: rank that computes it}."""
    home: list[dict[int, int]] = [{} for _ in range(num_stages)]
    for rank, row in enumerate(rows):
        for action in row:
            there = home[action.stage].setdefault(action.microbatch, rank)
            if there != rank:
                raise ProgramError(f"microbatch {action.microbatch} of stage {action.stage} is on ranks {there} and {rank}")
    return home
