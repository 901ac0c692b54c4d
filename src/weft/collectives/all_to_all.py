"""All-to-all: `block(s,t)` from rank s to rank t. In: numbers of ranks. Out: programs, direct or in two levels."""

from __future__ import annotations

from collections.abc import Sequence

from weft.collectives.steps import Move, Steps
from weft.errors import UsageError
from weft.plan.program import Held, Program, Value


def block(source: int, target: int) -> Value:
    """What rank `source` has for rank `target`."""
    return Value("block", (source, target))


def direct(num_ranks: int) -> Program:
    """n-1 steps; in step k every rank sends to the k-th after it.

    >>> from weft.plan.check import check
    >>> check(direct(5))
    """
    steps = Steps(num_ranks)
    for k in range(1, num_ranks):
        steps.together(Move(r, (r + k) % num_ranks, (block(r, (r + k) % num_ranks),)) for r in range(num_ranks))
    return _program(steps, "direct")


def two_level(sizes: Sequence[int]) -> Program:
    """First inside the boxes, to the rank whose number there is the target's; then between those: k + b - 2 messages, not k·b - 1.

    `sizes`: ranks of a box, and boxes. What crosses between two boxes goes in messages k times as large.

    >>> from weft.plan.check import check
    >>> check(two_level([4, 3]))

    Raises:
        UsageError: not two levels.
    """
    if len(sizes) != 2 or min(sizes) < 1:
        raise UsageError(f"two levels of 1 rank or more are needed, not {', '.join(map(str, sizes))}")
    width, boxes = sizes
    n = width * boxes
    steps = Steps(n)
    for k in range(1, width):
        moves = []
        for r in range(n):
            box, place = divmod(r, width)
            there = (place + k) % width
            moves.append(Move(r, box * width + there, tuple(block(r, b * width + there) for b in range(boxes))))
        steps.together(moves)
    for k in range(1, boxes):
        moves = []
        for r in range(n):
            box, place = divmod(r, width)
            there = (box + k) % boxes
            moves.append(Move(r, there * width + place, tuple(block(box * width + s, there * width + place) for s in range(width))))
        steps.together(moves)
    return _program(steps, "two_level")


def _program(steps: Steps, name: str) -> Program:
    n = steps.num_ranks
    initial: list[Held] = [{block(r, t): {r: 1} for t in range(n)} for r in range(n)]
    wants: list[Held] = [{block(s, r): {s: 1} for s in range(n)} for r in range(n)]
    return steps.program(name, initial, wants)
