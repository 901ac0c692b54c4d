"""Resume an interrupted step from gradient snapshots: when a rank's gradients hold exactly the first microbatches, and the program of the
rest.

The rest of a program is its actions without those of the finished microbatches, in each rank's own order, so sums add up in the same order
and come out bit for bit. The checker (`plan/ir/check`) proves that it can run from the snapshots, and that in the end each gradient has
each
microbatch once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from shardwise.errors import ProgramError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Action, Compute, ComputeOp, Content, Manage, Program, Value

MAX_COPY_FRACTION = 0.01  # of the time of microbatches, that gradient snapshots may take
NEVER = 1 << 20
MAX_COPY_BANDWIDTH, COPY_BANDWIDTH = 16e9, 4e9  # bytes/s into persistent memory: an upper bound; the planner's figure
MIN_STEP_S = 1.0  # of a step, at least, for gradient snapshots: recovery from a failure takes about as long
INPUT_GRADIENT_OPS, WEIGHT_GRADIENT_OPS = (
    frozenset({ComputeOp.B, ComputeOp.I}),
    frozenset({ComputeOp.B, ComputeOp.W}),
)  # computes of weight gradients: with input gradients, or separately


@dataclass(frozen=True, slots=True)
class GradientSubset:
    """Gradients that computes `ops` of `stages` accumulate into, on one rank."""

    stages: frozenset[int]
    ops: frozenset[ComputeOp]


def snapshot_step(row: Sequence[Action], subset: GradientSubset, k: int) -> int | None:
    """Return the step of a rank's `row` after which `subset` has exactly the microbatches below `k`; None where there is none, or no other
    comes.

    >>> row = Program.parse("0F0 0F1 0I0 0I1 0W0 0W1").actions[0]
    >>> inputs, weights = GradientSubset(frozenset({0}), INPUT_GRADIENT_OPS), GradientSubset(frozenset({0}), WEIGHT_GRADIENT_OPS)
    >>> snapshot_step(row, inputs, 1), snapshot_step(row, weights, 1), snapshot_step(row[::-1], weights, 1)
    (2, 4, None)
    """
    computes = [(step, a) for step, a in enumerate(row) if isinstance(a, Compute)]
    is_below = [(step, a.microbatch < k) for step, a in computes if a.stage in subset.stages and a.op in subset.ops]
    n = sum(inside for _, inside in is_below)
    return is_below[n - 1][0] if 0 < n < len(is_below) and all(inside for _, inside in is_below[:n]) else None


def snapshot_step_ranges(row: Sequence[Action], subsets: Iterable[GradientSubset], microbatches: int) -> dict[int, tuple[int, int]]:
    """Return, by `k`, the first and the last of the snapshot steps of all `subsets`, where each has one."""
    first_and_last = {}
    for k in range(1, microbatches):
        steps = [snapshot_step(row, part, k) for part in subsets]
        found = [step for step in steps if step is not None]
        if found and len(found) == len(steps):
            first_and_last[k] = (min(found), max(found))
    return first_and_last


def min_snapshot_spacing(step_ranges: dict[int, tuple[int, int]]) -> int:
    """Number of microbatches between gradient snapshots, at least, so that the steps of one snapshot are over before those of the next."""
    overlapping = (
        (k, other) for k, (_, last) in step_ranges.items() for other, (first, _) in step_ranges.items() if other > k and first <= last
    )
    return 1 + max((other - k for k, other in overlapping), default=0)


def snapshot_microbatches(possible: Iterable[int], every: int, after: int = 0) -> list[int]:
    """Return the `k`s at which gradients are saved: at least `every` microbatches apart.

    >>> snapshot_microbatches([2, 4, 6, 8, 10], 3), snapshot_microbatches(range(8), 2, after=3)
    ([4, 8], [5, 7])
    """
    chosen: list[int] = []
    for k in sorted(possible):
        if k - (chosen[-1] if chosen else after) >= every:
            chosen.append(k)
    return chosen


def snapshot_interval(copy_s: float, microbatch_s: float, share: float = MAX_COPY_FRACTION) -> int:
    """Number of microbatches between two gradient snapshots that take `copy_s` each. To resume from one saves a hundred times its cost.

    >>> snapshot_interval(0.02, 0.5), snapshot_interval(0.02, 0.001) >= 1000, snapshot_interval(1.0, 0.0) == NEVER
    (4, True, True)
    """
    return min(NEVER, max(1, ceil(copy_s / (share * microbatch_s)))) if share * microbatch_s > 0 else NEVER


def remaining_program(program: Program, k: int, rendezvous: bool = False) -> Program:
    """Return the program of microbatches from `k` on, given gradients that hold those below.

    >>> print(remaining_program(Program.parse("rank 0: 0F0 0B0 0F1 0B1 0F2 0B2"), 2).actions[0])
    (Compute(op=<ComputeOp.F: 'F'>, stage=0, microbatch=2), Compute(op=<ComputeOp.B: 'B'>, stage=0, microbatch=2))

    Raises:
        ProgramError: a rank's gradients never hold just those; or the checker refutes it.
    """
    initial = tuple({**before, **_snapshot_contents(program, rank, k)} for rank, before in enumerate(program.initial))
    actions = tuple(tuple(a for a in row if (m := _microbatch_of(a)) is None or m >= k) for row in program.actions)
    rest = replace(program, name=f"{program.name} from microbatch {k}", initial=initial, actions=actions)
    check(rest, rendezvous)
    return rest


def _snapshot_contents(program: Program, rank: int, k: int) -> dict[Value, Content]:
    """Return the contents of a rank's gradients in the snapshot, as its actions produce them."""
    row, contents = program.actions[rank], dict[Value, Content]()
    for stage in program.stages_of[rank]:
        value = Value("dw", (stage,))
        if not any(value in e.adds for e in program.effects[rank]):
            continue
        at = snapshot_step(row, GradientSubset(frozenset({stage}), WEIGHT_GRADIENT_OPS), k)
        if at is None or snapshot_step(row, GradientSubset(frozenset({stage}), INPUT_GRADIENT_OPS), k) is None:
            raise ProgramError(f"{program.name}: rank {rank}: the gradients of stage {stage} never hold just the microbatches below {k}")
        adds = [a for a, e in zip(row[: at + 1], program.effects[rank], strict=False) if value in e.adds]
        if not all(isinstance(a, Compute) for a in adds) or any(value in e.frees for e in program.effects[rank][: at + 1]):
            raise ProgramError(f"{program.name}: rank {rank}: the gradients of stage {stage} are summed before microbatch {k}")
        contents[value] = Counter(a.microbatch for a in adds if isinstance(a, Compute))
    return contents


def _microbatch_of(action: Action) -> int | None:
    if isinstance(action, (Compute, Manage)):
        return action.microbatch
    return action.value.index[2] if action.value.name in ("x", "g") else None


def writable_buffer(marks: Sequence[tuple[int, int]], rank: int, last_earlier_mark: int) -> int | None:
    """Return the buffer of two that a rank may write, by the marks of all ranks' buffers, of which those up to `last_earlier_mark` are of
    earlier steps; None: neither. A buffer stays that all ranks have, and are not beyond, or that others may come to have.

    >>> writable_buffer([(4, 0), (4, 8)], 0, 0), writable_buffer([(4, 8), (4, 8)], 0, 0), writable_buffer([(4, 8), (4, 0)], 0, 0)
    (1, 0, None)
    """
    own_marks, common = marks[rank], max(set(marks[0]).intersection(*map(set, marks)) | {0})
    for side in sorted(range(2), key=own_marks.__getitem__):
        mark = own_marks[side]
        is_superseded = any(mark not in its and max(its) > mark for its in marks)
        if mark <= last_earlier_mark or mark < common or (mark != common and is_superseded):
            return side
    return None
