"""Makespan of a pipeline schedule, without a timeline. In: the computes of each rank in order, seconds by stage and by link. Out: seconds.

Equal to `shardwise.simulate.clock` on the program that `shardwise.schedules.lower` makes of these computes, with asynchronous sends, in a
fiftieth of the time: for searches that time many programs. A stage may be on several ranks, each microbatch of it on one. Not
modelled: what the clock does not model, blocking sends, and gradient reduction between a stage's ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.plan.ir.program import Compute, ComputeOp, Links

_Work = tuple[Sequence[int], float, Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch.

    `forward_s`, `backward_s`: by stage; B is the full backward, R takes as long as F. `transfer_s`: by link (producer, consumer), equal
    in both directions; 0 if missing. `weight_s`: by stage, of W, the rest of B after I; half of B by default.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    transfer_s: Mapping[tuple[int, int], float]
    weight_s: Sequence[float] | None = None

    def by_operation(self) -> dict[ComputeOp, Sequence[float]]:
        """Return the seconds of every operation by stage."""
        weight_s = [b / 2 for b in self.backward_s] if self.weight_s is None else self.weight_s
        input_s = [b - w for b, w in zip(self.backward_s, weight_s, strict=True)]
        return {
            ComputeOp.F: self.forward_s,
            ComputeOp.B: self.backward_s,
            ComputeOp.I: input_s,
            ComputeOp.W: weight_s,
            ComputeOp.R: self.forward_s,
        }


def makespan_s(
    rows: Sequence[Sequence[Compute]], links: Links, times: StageTimes, remainder: tuple[int, StageTimes] | None = None
) -> float:
    """Seconds until the last compute and the last transfer have ended.

    Args:
        rows: [rank] -> its computes, in order.
        remainder: (first microbatch, times) of the microbatches of another size.

    >>> from shardwise.schedules import SCHEDULES
    >>> gpipe, ones = SCHEDULES["gpipe"](3, 3, ((0, 1), (1, 2))), StageTimes([1.0] * 3, [1.0] * 3, {})
    >>> makespan_s(gpipe, ((0, 1), (1, 2)), ones), makespan_s(gpipe, ((0, 1), (1, 2)), ones, (2, StageTimes([0.5] * 3, [0.5] * 3, {})))
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
    home = _home_ranks(rows, num_stages)
    # Inputs of a compute, its seconds, and its sends: to the nearest reader first, as in the program.
    first_remainder, remainder_times = remainder if remainder is not None else (1 << 62, times)
    works, remainder_works = (_build_works(before, after, t) for t in (times, remainder_times))
    arrived: dict[tuple[int, int, int], float] = {}  # (from stage, to stage, microbatch) -> when
    waiting: dict[tuple[int, int, int], int] = {}
    free: dict[tuple[int, int], float] = {}
    clock, at, end = [0.0] * len(rows), [0] * len(rows), 0.0
    ready = deque(range(len(rows)))
    while ready:
        rank = ready.popleft()
        row, now, step = rows[rank], clock[rank], at[rank]
        while step < len(row):
            op, s, m = row[step]
            waits, seconds, sends = (works if m < first_remainder else remainder_works)[op][s]
            blocked = False
            for q in waits:
                when = arrived.get((q, s, m))
                if when is None:
                    waiting[q, s, m] = rank
                    blocked = True
                    break
                if when > now:
                    now = when
            if blocked:
                break
            now += seconds
            for q, takes in sends:
                when, to = now, home[q].get(m, rank)
                if to != rank:
                    when = max(now, free.get((rank, to), 0.0)) + takes
                    free[rank, to] = when
                    if when > end:
                        end = when
                sent = (s, q, m)
                arrived[sent] = when
                if sent in waiting:
                    ready.append(waiting.pop(sent))
            step += 1
        clock[rank], at[rank] = now, step
    if any(step < len(row) for step, row in zip(at, rows, strict=True)):
        raise ProgramError("no rank can move; the order of the computes is not legal")
    return max(end, *clock) if clock else 0.0


def _build_works(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], times: StageTimes) -> dict[ComputeOp, list[_Work]]:
    """Return, by operation and stage: (stages that it waits for, seconds, [(stage it sends to, transfer seconds)])."""
    stages, takes = range(len(before)), times.transfer_s
    down = [[(q, takes.get((s, q), 0.0)) for q in sorted(after[s], key=lambda q: q - s)] for s in stages]
    up = [[(q, takes.get((q, s), 0.0)) for q in sorted(before[s], key=lambda q: s - q)] for s in stages]
    no_stages: list[list[int]] = [[] for _ in stages]
    no_sends: list[list[tuple[int, float]]] = [[] for _ in stages]
    links_of = {
        ComputeOp.F: (before, down),
        ComputeOp.B: (after, up),
        ComputeOp.I: (after, up),
        ComputeOp.W: (no_stages, no_sends),
        ComputeOp.R: (no_stages, no_sends),
    }
    seconds = times.by_operation()
    return {op: list(zip(waits, seconds[op], sends, strict=True)) for op, (waits, sends) in links_of.items()}


def _home_ranks(rows: Sequence[Sequence[Compute]], num_stages: int) -> list[dict[int, int]]:
    """[stage] -> {microbatch: rank that computes it}."""
    home: list[dict[int, int]] = [{} for _ in range(num_stages)]
    for rank, row in enumerate(rows):
        for _, stage, microbatch in row:
            home_rank = home[stage].setdefault(microbatch, rank)
            if home_rank != rank:
                raise ProgramError(f"microbatch {microbatch} of stage {stage} is on ranks {home_rank} and {rank}")
    return home
