"""Zero bubble: the backward is split into an input part I, which others wait for, and a weights part W, which fills idle time.

In: sizes. Out: the computes of each rank: H1 and H2 with stage s on rank s, V with two stages a rank, s and 2p-1-s on rank s.
Not modelled: orders made for given times (the automatic ones of the paper).
"""

from __future__ import annotations

from weft.errors import UsageError
from weft.plan.program import Compute, Links, Op
from weft.schedules.listed import Place, listed
from weft.schedules.lower.split import split_backward
from weft.schedules.one_f_one_b import one_f_one_b


def zb_h1(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """1F1B whose rank s is up to s weights parts behind: idle (p-1)(F+I-W) where 1F1B idles (p-1)(F+I+W), for m >= p.

    Every rank holds at most p microbatches, as many as 1F1B's first. (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024,
    section 2.1 and table 1.)
    """
    rows = one_f_one_b(num_stages, num_microbatches, links)
    return [[a for a in split_backward(row, lag=s) if isinstance(a, Compute)] for s, row in enumerate(rows)]


def zb_h2(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Fills the first idle time with more forwards: every rank idles (p-1)(F+I-2W) between its first and its last compute, for m >= 2p-1.

    Rank s runs 2(p-s)-2 forwards ahead and is up to 2s weights parts behind, so that every rank holds up to 2p-1 microbatches. Ranks
    start and end one after another: from the first start to the last end it is longer by up to (p-1)F. (Qi et al., as above.)
    """
    rows = []
    for s in range(num_stages):
        ahead = min(num_microbatches, 2 * (num_stages - s) - 1)
        row = [Compute(Op.F, s, m) for m in range(ahead)]
        for m in range(num_microbatches):
            row.append(Compute(Op.I, s, m))
            if m >= 2 * s:
                row.append(Compute(Op.W, s, m - 2 * s))
            if ahead + m < num_microbatches:
                row.append(Compute(Op.F, s, ahead + m))
        row += [Compute(Op.W, s, m) for m in range(max(0, num_microbatches - 2 * s), num_microbatches)]
        rows.append(row)
    return rows


def zb_v(num_stages: int, num_microbatches: int, links: Links) -> list[list[Compute]]:
    """Two stages a rank, down and back up: no rank idles between its first and its last compute where F = I = W and m >= 2p-1.

    Holds 2p stages' microbatches, each half of what a rank has: 1F1B's memory, on every rank. The first and the last stage are on one
    rank, so its first backward comes early. With fewer microbatches the order is that of a greedy list. (Qi et al., section 6.)

    Raises:
        UsageError: an odd number of stages.
    """
    if num_stages % 2:
        raise UsageError(f"zb-v has two stages a rank, and {num_stages} is odd; use an even number of stages")
    p = num_stages // 2
    if num_microbatches < num_stages - 1:
        return _few(p, num_microbatches)
    return [_Rank(r, p, num_microbatches).order() for r in range(p)]


class _Rank:
    """The order of one rank of V, written down as it is counted out."""

    def __init__(self, rank: int, num_ranks: int, num_microbatches: int) -> None:
        self.rank, self.num_ranks, self.num_microbatches = rank, num_ranks, num_microbatches
        self.row: list[Compute] = []
        self.next = {(op, stage): 0 for op in (Op.F, Op.I, Op.W) for stage in (rank, 2 * num_ranks - 1 - rank)}

    def add(self, op: Op, stage: int) -> None:
        """The next microbatch's, if there is one; its W only after its I."""
        m = self.next[op, stage]
        if m < (self.next[Op.I, stage] if op is Op.W else self.num_microbatches):
            self.row.append(Compute(op, stage, m))
            self.next[op, stage] = m + 1

    def order(self) -> list[Compute]:
        down, up = self.rank, 2 * self.num_ranks - 1 - self.rank
        before, after = self.rank, self.num_ranks - self.rank  # ranks before this one, and from it on
        for _ in range(2 * after - 1):
            self.add(Op.F, down)
        for _ in range(before):
            self.add(Op.F, up)
            self.add(Op.F, down)
        for _ in range(after):
            self.add(Op.F, up)
            self.add(Op.I, up)
            self.add(Op.W, up)
        while self.next[Op.F, up] < self.num_microbatches:
            self.add(Op.F, down)
            self.add(Op.I, down)
            self.add(Op.W, down)
            self.add(Op.F, up)
            self.add(Op.I, up)
            self.add(Op.W, up)
        for _ in range(before):
            self.add(Op.I, down)
            self.add(Op.I, up)
        for _ in range(after):
            self.add(Op.I, down)
            self.add(Op.W, down)
        for stage in (up, down):
            while self.next[Op.W, stage] < self.num_microbatches:
                self.add(Op.W, stage)
        return self.row


def _few(num_ranks: int, num_microbatches: int) -> list[list[Compute]]:
    """Input parts first, then forwards of the later stage, then weights parts; one place is kept free for the later stage's forward."""
    every = range(num_microbatches)
    places = [(Place(r, every), Place(2 * num_ranks - 1 - r, every)) for r in range(num_ranks)]
    rank_of = {Op.I: 0, Op.F: 1, Op.W: 2}
    return listed(
        places,
        2 * num_ranks,
        prefer=lambda a: (rank_of[a.op], -a.stage),
        room=lambda place, held, of_rank: of_rank < 2 * num_ranks - (place.stage < num_ranks),
        split=True,
    )
