"""A step that was interrupted, from the gradients on that its ranks have kept. In: its program, and a number of microbatches. Out: when a
rank's gradients hold exactly those below it, and the program of the others, proven.

The rest of a program is its actions but those of the microbatches that are in: in each rank's own order, so sums add up in the same order
and come out bit for bit. That it can run, and that in the end each gradient has each microbatch once, the checker proves of a program that
is given what was kept (`plan/check`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from weft.errors import ProgramError
from weft.plan.check import check
from weft.plan.program import Action, Compute, Content, Manage, Op, Program, Value

SHARE = 0.01  # of the time of microbatches, that keeping their gradients may take
NEVER = 1 << 20
FASTEST, COPIED = 16e9, 4e9  # bytes/s into memory that outlives a rank: more than any copy; what plans count with
WORTH_S = 1.0  # that a step lasts, for gradients to be kept: to go on after a loss takes about as long
INPUT, WEIGHT = frozenset({Op.B, Op.I}), frozenset({Op.B, Op.W})  # the computes that make weight gradients: with those of inputs, or later


@dataclass(frozen=True, slots=True)
class Part:
    """What computes `ops` of `stages` add to, on one rank."""

    stages: frozenset[int]
    ops: frozenset[Op]


def moment(row: Sequence[Action], part: Part, k: int) -> int | None:
    """The step of a rank's `row` after which `part` has microbatches below `k` and no other; None where there is none, or no other comes.

    >>> row = Program.parse("0F0 0F1 0I0 0I1 0W0 0W1").actions[0]
    >>> inputs, weights = Part(frozenset({0}), INPUT), Part(frozenset({0}), WEIGHT)
    >>> moment(row, inputs, 1), moment(row, weights, 1), moment(row[::-1], weights, 1)
    (2, 4, None)
    """
    computes = [(step, a) for step, a in enumerate(row) if isinstance(a, Compute)]
    adds = [(step, a.microbatch < k) for step, a in computes if a.stage in part.stages and a.op in part.ops]
    n = sum(inside for _, inside in adds)
    return adds[n - 1][0] if 0 < n < len(adds) and all(inside for _, inside in adds[:n]) else None


def spans(row: Sequence[Action], parts: Iterable[Part], microbatches: int) -> dict[int, tuple[int, int]]:
    """By `k`, the first and the last of the moments of all `parts`, where each has one."""
    first_and_last = {}
    for k in range(1, microbatches):
        steps = [moment(row, part, k) for part in parts]
        at = [step for step in steps if step is not None]
        if at and len(at) == len(steps):
            first_and_last[k] = (min(at), max(at))
    return first_and_last


def apart(moments: dict[int, tuple[int, int]]) -> int:
    """How many microbatches apart gradients can be kept, so that the moments of one `k` are over when those of the next begin."""
    met = ((k, other) for k, (_, last) in moments.items() for other, (first, _) in moments.items() if other > k and first <= last)
    return 1 + max((other - k for k, other in met), default=0)


def kept_at(possible: Iterable[int], every: int, after: int = 0) -> list[int]:
    """The `k`s at which gradients are kept: at least `every` microbatches apart.

    >>> kept_at([2, 4, 6, 8, 10], 3), kept_at(range(8), 2, after=3)
    ([4, 8], [5, 7])
    """
    chosen: list[int] = []
    for k in sorted(possible):
        if k - (chosen[-1] if chosen else after) >= every:
            chosen.append(k)
    return chosen


def keeps_every(copy_s: float, microbatch_s: float, share: float = SHARE) -> int:
    """Microbatches between two copies of the gradients that take `copy_s` each. To go on from one saves a hundred times what it cost.

    >>> keeps_every(0.02, 0.5), keeps_every(0.02, 0.001) >= 1000, keeps_every(1.0, 0.0) == NEVER
    (4, True, True)
    """
    return min(NEVER, max(1, ceil(copy_s / (share * microbatch_s)))) if share * microbatch_s > 0 else NEVER


def rest_of(program: Program, k: int, rendezvous: bool = False) -> Program:
    """The program of microbatches from `k` on, given what its ranks' gradients hold of those below.

    >>> print(rest_of(Program.parse("rank 0: 0F0 0B0 0F1 0B1 0F2 0B2"), 2).actions[0])
    (Compute(op=<Op.F: 'F'>, stage=0, microbatch=2), Compute(op=<Op.B: 'B'>, stage=0, microbatch=2))

    Raises:
        ProgramError: a rank's gradients never hold just those; or the checker refutes it.
    """
    initial = tuple({**before, **_held(program, rank, k)} for rank, before in enumerate(program.initial))
    actions = tuple(tuple(a for a in row if (m := _microbatch(a)) is None or m >= k) for row in program.actions)
    rest = replace(program, name=f"{program.name} from microbatch {k}", initial=initial, actions=actions)
    check(rest, rendezvous)
    return rest


def _held(program: Program, rank: int, k: int) -> dict[Value, Content]:
    """What the gradients of a rank hold when they are kept, as its actions make them."""
    row, held = program.actions[rank], dict[Value, Content]()
    for stage in program.stages_of[rank]:
        value = Value("dw", (stage,))
        if not any(value in e.adds for e in program.effects[rank]):
            continue
        at = moment(row, Part(frozenset({stage}), WEIGHT), k)
        if at is None or moment(row, Part(frozenset({stage}), INPUT), k) is None:
            raise ProgramError(f"{program.name}: rank {rank}: the gradients of stage {stage} never hold just the microbatches below {k}")
        adds = [a for a, e in zip(row[: at + 1], program.effects[rank], strict=False) if value in e.adds]
        if not all(isinstance(a, Compute) for a in adds) or any(value in e.frees for e in program.effects[rank][: at + 1]):
            raise ProgramError(f"{program.name}: rank {rank}: the gradients of stage {stage} are summed before microbatch {k}")
        held[value] = Counter(a.microbatch for a in adds if isinstance(a, Compute))
    return held


def _microbatch(action: Action) -> int | None:
    if isinstance(action, (Compute, Manage)):
        return action.microbatch
    return action.value.index[2] if action.value.name in ("x", "g") else None


def writable(marks: Sequence[tuple[int, int]], rank: int, first: int) -> int | None:
    """The side that a rank may write, by the marks of all ranks' sides, of which those up to `first` are of earlier steps; None: it keeps
    what it has. A side stays that all ranks have, and are not beyond, or that others may come to have.

    >>> writable([(4, 0), (4, 8)], 0, 0), writable([(4, 8), (4, 8)], 0, 0), writable([(4, 8), (4, 0)], 0, 0)
    (1, 0, None)
    """
    mine, common = marks[rank], max(set(marks[0]).intersection(*map(set, marks)) | {0})
    for side in sorted(range(2), key=mine.__getitem__):
        mark = mine[side]
        passed = any(mark not in its and max(its) > mark for its in marks)
        if mark <= first or mark < common or (mark != common and passed):
            return side
    return None
