"""How long a pipeline takes, and nothing else. In: the computes of each rank in order, seconds by stage and by link. Out: seconds.

The same times as `weft.simulate.clock` gives the program that `weft.schedules.lower` makes of these computes, where a send is posted, in a
fiftieth of the time: for searches that time many programs. Not modelled: what the clock does not model, and sends that wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from weft.errors import ProgramError
from weft.plan.program import Compute, Links, Op


def makespan_s(
    rows: Sequence[Sequence[Compute]],
    links: Links,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Mapping[tuple[int, int], float],
) -> float:
    """Seconds until the last compute and the last transfer have ended.

    Args:
        rows: [rank] -> its computes (F and B), in order.
        forward_s, backward_s: by stage. transfer_s: by link (producer, consumer), the same both ways; 0 where it is missing.

    >>> from weft.schedules import SCHEDULES
    >>> makespan_s(SCHEDULES["gpipe"](3, 3, ((0, 1), (1, 2))), ((0, 1), (1, 2)), [1.0] * 3, [1.0] * 3, {})
    10.0

    Raises:
        ProgramError: no rank can move, or a stage on several ranks.
    """
    num_stages = len(forward_s)
    before: list[list[int]] = [[] for _ in range(num_stages)]
    after: list[list[int]] = [[] for _ in range(num_stages)]
    for source, target in links:
        before[target].append(source)
        after[source].append(target)
    home = [-1] * num_stages
    for rank, row in enumerate(rows):
        for stage in {action.stage for action in row}:
            if home[stage] >= 0:
                raise ProgramError(f"stage {stage} is on ranks {home[stage]} and {rank}; it is timed on one")
            home[stage] = rank
    # What a compute sends, and to which rank: the nearest reader's first, as the program has it.
    sends = {
        Op.F: [[(q, home[q], transfer_s.get((s, q), 0.0)) for q in sorted(after[s], key=lambda q: q - s)] for s in range(num_stages)],
        Op.B: [[(q, home[q], transfer_s.get((q, s), 0.0)) for q in sorted(before[s], key=lambda q: s - q)] for s in range(num_stages)],
    }
    waits = {Op.F: before, Op.B: after}
    seconds = {Op.F: forward_s, Op.B: backward_s}
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
            for q, to, takes in sends[action.op][s]:
                when = now
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
