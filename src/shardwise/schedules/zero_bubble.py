"""Zero bubble: the backward is split into an input part I, which other ranks wait for, and a weight part W, which fills idle time.

In: sizes. Out: the computes of each rank: H1 and H2 with stage s on rank s, V with two stages a rank, s and 2p-1-s on rank s.
Not modelled: orders optimised for given times (the paper's automatic schedules).
"""

from __future__ import annotations

from shardwise.errors import UsageError
from shardwise.plan.ir.program import Compute, ComputeOp, Links
from shardwise.schedules.list_scheduling import StageMicrobatches, list_schedule
from shardwise.schedules.lower.split import split_backward
from shardwise.schedules.one_f_one_b import one_f_one_b


def zb_h1(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return ZB-H1: 1F1B whose rank s defers up to s weight parts: idle (p-1)(F+I-W) where 1F1B idles (p-1)(F+I+W), for m >= p.

    Every rank saves at most p microbatches, as many as 1F1B's first. (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
    section 2.1 and table 1.)
    """
    rows = one_f_one_b(num_stages, num_microbatches, links)
    return [[a for a in split_backward(row, lag=s) if isinstance(a, Compute)] for s, row in enumerate(rows)]


def zb_h2(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return ZB-H2, with more warmup forwards: every rank idles (p-1)(F+I-2W) from its first to its last compute, for m >= 2p-1.

    Rank s runs 2(p-s)-2 forwards ahead and defers up to 2s weight parts, so that every rank saves up to 2p-1 microbatches. Ranks
    start and end one after another: from the first start to the last end it is longer by up to (p-1)F. (Qi et al., as above.)
    """
    rows = []
    for s in range(num_stages):
        warmup = min(num_microbatches, 2 * (num_stages - s) - 1)
        row = [Compute(ComputeOp.F, s, m) for m in range(warmup)]
        for m in range(num_microbatches):
            row.append(Compute(ComputeOp.I, s, m))
            if m >= 2 * s:
                row.append(Compute(ComputeOp.W, s, m - 2 * s))
            if warmup + m < num_microbatches:
                row.append(Compute(ComputeOp.F, s, warmup + m))
        row += [Compute(ComputeOp.W, s, m) for m in range(max(0, num_microbatches - 2 * s), num_microbatches)]
        rows.append(row)
    return rows


def zb_v(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Return ZB-V, two stages a rank, down and back up: no rank idles from its first to its last compute if F = I = W and m >= 2p-1.

    Saves microbatches of 2p stages, each half of a rank's: 1F1B's memory, on every rank. The first and the last stage are on one
    rank, so its first backward comes early. With fewer microbatches the order is that of list scheduling. (Qi et al., section 6.)

    Raises:
        UsageError: an odd number of stages.
    """
    if num_stages % 2:
        raise UsageError(f"zb-v has two stages a rank, and {num_stages} is odd; use an even number of stages")
    p = num_stages // 2
    if num_microbatches < num_stages - 1:
        return _zb_v_with_few_microbatches(p, num_microbatches)
    return [_ZbVRank(r, p, num_microbatches).ordered_computes() for r in range(p)]


class _ZbVRank:
    """The order of one rank of ZB-V, built action by action."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.rank, self.num_ranks, self.num_microbatches = rank, num_ranks, num_microbatches
        self.row: list[Compute] = []
        self.next_microbatch = {
            (op, stage): 0 for op in (ComputeOp.F, ComputeOp.I, ComputeOp.W) for stage in (rank, 2 * num_ranks - 1 - rank)
        }

    def add(self, op: ComputeOp, stage: int) -> None:
        """Append `op` of the next microbatch, if there is one; W only after its I."""
        m = self.next_microbatch[op, stage]
        if m < (self.next_microbatch[ComputeOp.I, stage] if op is ComputeOp.W else self.num_microbatches):
            self.row.append(Compute(op, stage, m))
            self.next_microbatch[op, stage] = m + 1

    def ordered_computes(self) -> list[Compute]:
        down, up = self.rank, 2 * self.num_ranks - 1 - self.rank
        num_before, num_from = self.rank, self.num_ranks - self.rank  # ranks before this one, and from it on
        for _ in range(2 * num_from - 1):
            self.add(ComputeOp.F, down)
        for _ in range(num_before):
            self.add(ComputeOp.F, up)
            self.add(ComputeOp.F, down)
        for _ in range(num_from):
            self.add(ComputeOp.F, up)
            self.add(ComputeOp.I, up)
            self.add(ComputeOp.W, up)
        while self.next_microbatch[ComputeOp.F, up] < self.num_microbatches:
            self.add(ComputeOp.F, down)
            self.add(ComputeOp.I, down)
            self.add(ComputeOp.W, down)
            self.add(ComputeOp.F, up)
            self.add(ComputeOp.I, up)
            self.add(ComputeOp.W, up)
        for _ in range(num_before):
            self.add(ComputeOp.I, down)
            self.add(ComputeOp.I, up)
        for _ in range(num_from):
            self.add(ComputeOp.I, down)
            self.add(ComputeOp.W, down)
        for stage in (up, down):
            while self.next_microbatch[ComputeOp.W, stage] < self.num_microbatches:
                self.add(ComputeOp.W, stage)
        return self.row


def _zb_v_with_few_microbatches(num_ranks: int, num_microbatches: int) -> list[list[Compute]]:
    """Return a list schedule: input parts first, then the later stage's forwards, for which one slot stays free, then weight parts."""
    microbatches = range(num_microbatches)
    places = [(StageMicrobatches(r, microbatches), StageMicrobatches(2 * num_ranks - 1 - r, microbatches)) for r in range(num_ranks)]
    priority_of = {ComputeOp.I: 0, ComputeOp.F: 1, ComputeOp.W: 2}
    return list_schedule(
        places,
        2 * num_ranks,
        priority=lambda a: (priority_of[a.op], -a.stage),
        has_memory=lambda place, num_in_flight, num_on_rank: num_on_rank < 2 * num_ranks - (place.stage < num_ranks),
        splits_backward=True,
    )
