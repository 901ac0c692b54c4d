"""Interleaved 1F1B: every rank has several stages, `chunks` of them, so that the pipeline fills and drains in shorter steps.

In: sizes and links. Out: the computes of each rank, rank r having stages r, r + p, r + 2p, ... of p ranks.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weft.errors import UsageError
from weft.plan.program import Compute, Links, Op
from weft.schedules.one_f_one_b import one_f_one_b


def interleaved(num_stages: int, num_microbatches: int, links: Links, chunks: int = 1) -> list[list[Compute]]:
    """Idle for (p-1)/(v·m) of the compute, v = `chunks`, where 1F1B idles (p-1)/m, for any m >= p.

    With fewer microbatches it takes (pv + m - 1)(F + B) of a stage, and no order takes less: the last rank cannot start its m forwards
    and backwards of the last stage before pv - 1 forwards, and pv - 1 backwards follow them.

    A group of p microbatches runs through chunk 0, then through chunk 1, and so on; backward in the opposite order of chunks. Before
    it alternates rank r runs 2(p-1-r) + (v-1)p forwards. Where p does not divide m the groups are as equal as can be and larger
    than p, since a shorter one would wait for itself. (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters", SC 2021, section 2.2.)

    Raises:
        UsageError: stages that do not divide into chunks.
    """
    if chunks < 1 or num_stages % chunks:
        raise UsageError(f"{num_stages} stages do not divide into {chunks} chunks a rank; use a multiple of {chunks}")
    if chunks == 1:
        return one_f_one_b(num_stages, num_microbatches, links)
    p = num_stages // chunks
    forward: list[tuple[int, int]] = []  # (chunk, microbatch) in order
    backward: list[tuple[int, int]] = []
    for group in _groups(num_microbatches, p):
        forward += [(c, m) for c in range(chunks) for m in group]
        backward += [(c, m) for c in reversed(range(chunks)) for m in group]
    ahead = [most_in_flight(p, num_microbatches, chunks, r) - 1 for r in range(p)]
    total = len(forward)
    rows = []
    for r in range(p):
        row = [Compute(Op.F, c * p + r, m) for c, m in forward[: ahead[r]]]
        for i, (c, m) in enumerate(backward):
            if ahead[r] + i < total:
                chunk, microbatch = forward[ahead[r] + i]
                row.append(Compute(Op.F, chunk * p + r, microbatch))
            row.append(Compute(Op.B, c * p + r, m))
        rows.append(row)
    return rows


@cache
def most_in_flight(num_ranks: int, num_microbatches: int, chunks: int, rank: int) -> int:
    """Forwards of one stage whose activations rank `rank` holds at once, all its chunks together.

    >>> [most_in_flight(4, 8, 2, rank) for rank in range(4)]
    [11, 9, 7, 5]

    Raises:
        UsageError: a rank outside the pipeline.
    """
    if not 0 <= rank < num_ranks:
        raise UsageError(f"rank {rank} of a pipeline of {num_ranks} ranks does not exist")
    if chunks == 1:
        return min(num_microbatches, num_ranks - rank)
    longest = max(map(len, _groups(num_microbatches, num_ranks)))
    return min(num_microbatches * chunks, 2 * (num_ranks - 1 - rank) + (chunks - 1) * longest + 1)


def forwards_and_backwards(num_ranks: int, num_microbatches: int, chunks: int, rank: int) -> tuple[NDArray[np.intp], NDArray[np.intp], int]:
    """The chunks of a rank's forwards in order, those of its backwards, and how many forwards run before the first of those.

    >>> forward, backward, ahead = forwards_and_backwards(2, 2, 2, 0)
    >>> forward.tolist(), backward.tolist(), ahead
    ([0, 0, 1, 1], [1, 1, 0, 0], 4)
    """
    sizes = [len(group) for group in _groups(num_microbatches, num_ranks) for _ in range(chunks)]
    forward = np.repeat(np.tile(np.arange(chunks), len(sizes) // chunks), sizes)
    return forward, chunks - 1 - forward, most_in_flight(num_ranks, num_microbatches, chunks, rank)


def _groups(num_microbatches: int, num_ranks: int) -> list[range]:
    """Microbatches in order, in groups of at least `num_ranks` as equal as can be; one group where there are fewer."""
    count = max(1, num_microbatches // num_ranks)
    ends = [i * num_microbatches // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(ends)]
