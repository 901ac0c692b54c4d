"""All-reduce over nested levels: inside a box, between boxes, and so on. In: sizes of the levels. Out: a program.

Every rank of a box has its share of what goes between boxes, so that all of a box's rails are used; nothing else than that share does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from weft.collectives import ring
from weft.collectives import steps as spec
from weft.collectives.steps import Steps
from weft.errors import UsageError
from weft.plan.program import Program


def all_reduce(sizes: Sequence[int]) -> Program:
    """`sizes`: ranks of a box, boxes of a rack, and so on, innermost first; neighbours in number share a box.

    Inside, rings scatter sums; every rank sums its piece with those of its like in the other boxes; rings gather. Between boxes go
    2M(b-1)/(k·b) a rank, of b boxes of k ranks, and the latencies are 2(k-1) near ones and 2(b-1) far ones.

    >>> from weft.plan.check import check
    >>> check(all_reduce([4, 2])), check(all_reduce([3, 2, 2]))
    (None, None)

    Raises:
        UsageError: a level without ranks.
    """
    if not sizes or min(sizes) < 1:
        raise UsageError(f"levels of {', '.join(map(str, sizes)) or 'no'} ranks; every level needs 1 or more")
    steps = Steps(prod(sizes))
    _levels(steps, list(range(steps.num_ranks)), list(range(steps.num_ranks)), list(sizes))
    return spec.all_reduce(steps, "hierarchical", steps.num_ranks)


def _levels(steps: Steps, ranks: list[int], pieces: list[int], sizes: list[int]) -> None:
    """Sum `pieces` over `ranks`, whose boxes are of sizes[0] neighbours."""
    width, rest = sizes[0], sizes[1:]
    share = len(pieces) // width
    parts = [pieces[i * share : (i + 1) * share] for i in range(width)]
    boxes = [ranks[i : i + width] for i in range(0, len(ranks), width)]
    for box in boxes:
        ring.scatter_steps(steps, box, parts)
    if rest:
        for i in range(width):
            _levels(steps, [box[i] for box in boxes], parts[i], rest)
    for box in boxes:
        ring.gather_steps(steps, box, parts)
