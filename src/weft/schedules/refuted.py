"""Why computes without transfers are no schedule, in the words of who wrote them. In: a program that names no transfers. Out: a reason
with the rank, the step, the action and what to write instead; empty where nothing is found.

The proof (`weft.plan.check`) is of what runs: transfers that were put in, at steps that count those. It has the last word on what is
right; what is said here is of the same fault, as the file has it. Rendezvous is not looked at: it is about transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from weft.errors import ProgramError
from weft.plan.action import Action, Compute, Manage, ManageOp, Op, Recv, Send, Value
from weft.plan.check import check
from weft.plan.program import Effects, Program, effects

_LINKS = ("x", "g")  # values that go to another rank; all others stay where they are made
_UNDO = {ManageOp.OFFLOAD: "LOAD", ManageOp.DROP: "R", ManageOp.RESHARD: "UNSHARD"}
_MOST = 4  # ranks of which a reason says what they wait for


def prove(program: Program, rendezvous: bool = False, written: Program | None = None) -> None:
    """`check`, of a program that was `written` without the transfers that it has.

    Raises:
        ProgramError: refuted, in the words of what was written.
    """
    try:
        check(program, rendezvous)
    except ProgramError as error:
        raise reworded(program if written is None else written, error) from None


def reworded(program: Program, error: ProgramError) -> ProgramError:
    """The error that refutes a program, in the words of its own computes, where it names no transfers.

    >>> from weft.errors import ProgramError
    >>> print(reworded(Program.parse("0F0 0F1 0B0"), ProgramError("rank 0 step 3 (its end): wanted dw(0) lacks contribution 1")))
    program: stage 0 has no backward on microbatch 1; write 0B1 on rank 0, after 0F1
    """
    if any(isinstance(a, (Send, Recv)) for row in program.actions for a in row):
        return error
    reason = next(iter((*_twice(program), *_missing(program), *_order(program))), "")
    return ProgramError(f"{program.name}: {reason}") if reason else error


def _computes(program: Program) -> Iterator[tuple[int, int, Compute]]:
    for rank, row in enumerate(program.actions):
        for step, action in enumerate(row):
            if isinstance(action, Compute) and action.op is not Op.R:  # what is dropped again may be computed again
                yield rank, step, action


def _twice(program: Program) -> Iterator[str]:
    """A compute that is there already, or a backward both whole and in parts."""
    seen: dict[tuple[str, int, int], tuple[int, int, Compute]] = {}
    for rank, step, action in _computes(program):
        for part in ("I", "W") if action.op is Op.B else (action.op,):
            first = seen.setdefault((part, *action[1:]), (rank, step, action))
            if first[:2] != (rank, step):
                why = "leave one of them out" if first[2] == action else "B is I and W in one, so leave either out"
                yield f"rank {rank} step {step}: {action}, and rank {first[0]} has {first[2]} at step {first[1]}; {why}"


def _missing(program: Program) -> Iterator[str]:
    """A stage that no rank has, a backward without its forward or on another rank, a forward without a backward where others have one."""
    where = {action: (rank, step) for rank, step, action in _computes(program)}
    stages = {action.stage for action in where}
    for stage in range(program.num_stages):
        if stage not in stages:
            yield f"no rank computes stage {stage}, and there is a stage {program.num_stages - 1}; number stages from 0 without gaps"
    for action, (rank, step) in where.items():
        if action.op is Op.F:
            continue
        _, stage, m = action
        of = Compute(Op.I if action.op is Op.W else Op.F, stage, m)
        if of not in where:
            yield f"rank {rank} step {step}: {action} needs {of}, which no rank has; write {of} before it on rank {rank}"
        elif where[of][0] != rank:
            there = where[of][0]
            yield f"rank {rank} step {step}: {action} needs what {of} leaves on rank {there}; write both on one rank"
    if all(action.op is Op.F for action in where):
        return
    for (_, stage, m), (rank, _) in [(a, at) for a, at in where.items() if a.op is Op.F]:
        backward, first, last = (Compute(op, stage, m) for op in (Op.B, Op.I, Op.W))
        if backward not in where and first not in where:
            yield f"stage {stage} has no backward on microbatch {m}; write {backward} on rank {rank}, after {stage}F{m}"
        elif first in where and last not in where:
            yield f"stage {stage} has no weights part of the backward on microbatch {m}; write {last} on rank {rank}, after {first}"
    every = {action.microbatch for action in where}
    for stage in range(program.num_stages):
        for m in sorted(every):
            if Compute(Op.F, stage, m) not in where:
                yield f"stage {stage} has no forward on microbatch {m}; write {stage}F{m} and {stage}B{m} on one rank"


def _order(program: Program) -> Iterator[str]:
    """Where a rank reads what it no longer holds, or all ranks wait for one another."""
    row_effects = [[effects(action, program) for action in row] for row in program.actions]
    maker = {v: (rank, step) for rank, row in enumerate(row_effects) for step, e in enumerate(row) for v in e.writes if v.name in _LINKS}
    values: set[Value] = set()
    held: list[set[Value]] = [set() for _ in row_effects]
    at = [0] * len(row_effects)

    def lacks(rank: int, step: int) -> list[Value]:
        """Of the values that other computes hand on, those that are not made yet."""
        return [v for v in row_effects[rank][step].reads if v.name in _LINKS and v not in values]

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(row_effects):
            while at[rank] < len(row) and not lacks(rank, at[rank]):
                step, e = at[rank], row[at[rank]]
                reads = [v for v in e.reads if v.name not in _LINKS]
                if gone := [v for v in reads if v not in held[rank]]:
                    yield f"rank {rank} step {step}: {program.actions[rank][step]} reads {_why(program.actions[rank], row, step, gone[0])}"
                    return
                held[rank].difference_update(e.frees)
                held[rank].update((*e.writes, *e.adds))
                values.update(v for v in e.writes if v.name in _LINKS)
                at[rank], moved = step + 1, True
    heads = [(rank, step) for rank, step in enumerate(at) if step < len(row_effects[rank])]
    if not heads:
        return
    waits = []
    for rank, step in heads:
        there, later = maker.get(lacks(rank, step)[0], (rank, step))
        for_what = f"{program.actions[there][later]}, step {later} of rank {there}"
        waits.append(f"rank {rank} step {step}: {program.actions[rank][step]} waits for {for_what}")
    more = f"\n  and {len(waits) - _MOST} more ranks wait" if len(waits) > _MOST else ""
    said = "no rank can go on\n  " + "\n  ".join(waits[:_MOST]) + more
    for rank, step in heads:  # what could run now, were it not behind what waits
        for later in range(step + 1, len(row_effects[rank])):
            e, action = row_effects[rank][later], program.actions[rank][later]
            if isinstance(action, Compute) and not lacks(rank, later) and held[rank].issuperset(_local(e.reads)):
                head = program.actions[rank][step]
                yield f"{said}\nwrite {action} of rank {rank}, at step {later}, before {head} at step {step}: it can run"
                return
    yield said


def _local(values: Iterable[Value]) -> list[Value]:
    return [v for v in values if v.name not in _LINKS]


def _why(row: Sequence[Action], row_effects: Sequence[Effects], step: int, value: Value) -> str:
    """A value that a rank does not hold at a step, why not, and what to do about it."""
    freed = [i for i in range(step) if value in row_effects[i].frees]
    later = [i for i in range(step + 1, len(row)) if value in (*row_effects[i].writes, *row_effects[i].adds)]
    if later:
        return f"{value}, which only {row[later[0]]} at step {later[0]} makes; write {row[later[0]]} before it"
    if freed:
        gone, remedy = row[freed[-1]], "leave one of them out"
        if isinstance(gone, Manage) and (word := _UNDO.get(gone.op)):
            remedy = f"write {gone.stage}{word}{'' if gone.microbatch is None else gone.microbatch} between them"
        return f"{value}, which {gone} at step {freed[-1]} let go; {remedy}"
    return f"{value}, which no action of this rank makes; leave {row[step]} out, or write before it what makes that"
