"""Diagnose an invalid custom schedule in terms of its own file. In: a program without transfers. Out: a reason with the rank, the step,
the action and what to write instead; empty if no fault is found.

The proof (`shardwise.plan.ir.check`) is about the program that runs: with transfers, which its steps count. It decides what is valid; the
diagnosis describes the same fault in the steps of the file. Rendezvous is not considered: it concerns transfers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import Action, Compute, ComputeOp, Manage, ManageOp, Recv, Send, Value
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Effects, Program, effects_of

_LINK_VALUES = ("x", "g")  # values that are sent to another rank; all others stay on the rank that produces them
_UNDO = {ManageOp.OFFLOAD: "LOAD", ManageOp.DROP: "R", ManageOp.RESHARD: "UNSHARD"}
_MAX_RANKS_SHOWN = 4  # waiting ranks that a reason lists


def prove_program(program: Program, rendezvous: bool = False, written: Program | None = None) -> None:
    """Check a program; `written` is its original without transfers.

    Raises:
        ProgramError: refuted, in terms of the original.
    """
    try:
        check(program, rendezvous)
    except ProgramError as error:
        raise diagnose_error(program if written is None else written, error) from None


def diagnose_error(program: Program, error: ProgramError) -> ProgramError:
    """Return the error that refutes a program in terms of its own computes, if it has no transfers.

    >>> from shardwise.errors import ProgramError
    >>> print(diagnose_error(Program.parse("0F0 0F1 0B0"), ProgramError("rank 0 step 3 (its end): wanted dw(0) lacks contribution 1")))
    program: stage 0 has no backward on microbatch 1; write 0B1 on rank 0, after 0F1
    """
    if any(isinstance(a, (Send, Recv)) for row in program.actions for a in row):
        return error
    reason = next(iter((*_find_duplicates(program), *_find_missing_computes(program), *_find_order_faults(program))), "")
    return ProgramError(f"{program.name}: {reason}") if reason else error


def _iterate_computes(program: Program) -> Iterator[tuple[int, int, Compute]]:
    for rank, row in enumerate(program.actions):
        for step, action in enumerate(row):
            if isinstance(action, Compute) and action.op is not ComputeOp.R:  # dropped repeatedly, it may be recomputed repeatedly
                yield rank, step, action


def _find_duplicates(program: Program) -> Iterator[str]:
    """Yield duplicate computes, and backwards that are there both whole and in parts."""
    first_by_part: dict[tuple[str, int, int], tuple[int, int, Compute]] = {}
    for rank, step, action in _iterate_computes(program):
        for part in ("I", "W") if action.op is ComputeOp.B else (action.op,):
            first = first_by_part.setdefault((part, *action[1:]), (rank, step, action))
            if first[:2] != (rank, step):
                why = "leave one of them out" if first[2] == action else "B is I and W in one, so leave either out"
                yield f"rank {rank} step {step}: {action}, and rank {first[0]} has {first[2]} at step {first[1]}; {why}"


def _find_missing_computes(program: Program) -> Iterator[str]:
    """Yield stages on no rank, backwards without their forward or on another rank, forwards without a backward if others have one."""
    where = {action: (rank, step) for rank, step, action in _iterate_computes(program)}
    stages = {action.stage for action in where}
    for stage in range(program.num_stages):
        if stage not in stages:
            yield f"no rank computes stage {stage}, and there is a stage {program.num_stages - 1}; number stages from 0 without gaps"
    for action, (rank, step) in where.items():
        if action.op is ComputeOp.F:
            continue
        _, stage, m = action
        source = Compute(ComputeOp.I if action.op is ComputeOp.W else ComputeOp.F, stage, m)
        if source not in where:
            yield f"rank {rank} step {step}: {action} needs {source}, which no rank has; write {source} before it on rank {rank}"
        elif where[source][0] != rank:
            source_rank = where[source][0]
            yield f"rank {rank} step {step}: {action} needs what {source} leaves on rank {source_rank}; write both on one rank"
    if all(action.op is ComputeOp.F for action in where):
        return
    for (_, stage, m), (rank, _) in [(a, position) for a, position in where.items() if a.op is ComputeOp.F]:
        backward, first, last = (Compute(op, stage, m) for op in (ComputeOp.B, ComputeOp.I, ComputeOp.W))
        if backward not in where and first not in where:
            yield f"stage {stage} has no backward on microbatch {m}; write {backward} on rank {rank}, after {stage}F{m}"
        elif first in where and last not in where:
            yield f"stage {stage} has no weights part of the backward on microbatch {m}; write {last} on rank {rank}, after {first}"
    microbatches = {action.microbatch for action in where}
    for stage in range(program.num_stages):
        for m in sorted(microbatches):
            if Compute(ComputeOp.F, stage, m) not in where:
                yield f"stage {stage} has no forward on microbatch {m}; write {stage}F{m} and {stage}B{m} on one rank"


def _find_order_faults(program: Program) -> Iterator[str]:
    """Yield a read of a value that the rank does not hold, or a deadlock."""
    actions, row_effects = program.actions, [[effects_of(action, program) for action in row] for row in program.actions]
    maker = {
        v: (rank, step) for rank, row in enumerate(row_effects) for step, e in enumerate(row) for v in e.writes if v.name in _LINK_VALUES
    }
    values: set[Value] = set()
    held: list[set[Value]] = [set() for _ in row_effects]
    at = [0] * len(row_effects)

    def lacks(rank: int, step: int) -> list[Value]:
        """Return the values sent by other computes that are not produced yet."""
        return [v for v in row_effects[rank][step].reads if v.name in _LINK_VALUES and v not in values]

    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(row_effects):
            while at[rank] < len(row) and not lacks(rank, at[rank]):
                step, e = at[rank], row[at[rank]]
                reads = [v for v in e.reads if v.name not in _LINK_VALUES]
                if absent := [v for v in reads if v not in held[rank]]:
                    yield f"rank {rank} step {step}: {actions[rank][step]} reads {_explain_missing_value(actions[rank], row, step, absent[0])}"  # noqa: E501
                    return
                held[rank].difference_update(e.frees)
                held[rank].update((*e.writes, *e.adds))
                values.update(v for v in e.writes if v.name in _LINK_VALUES)
                at[rank], progressed = step + 1, True
    heads = [(rank, step) for rank, step in enumerate(at) if step < len(row_effects[rank])]
    if not heads:
        return
    waits = []
    for rank, step in heads:
        producer, later = maker.get(lacks(rank, step)[0], (rank, step))
        awaited = f"{actions[producer][later]}, step {later} of rank {producer}"
        waits.append(f"rank {rank} step {step}: {actions[rank][step]} waits for {awaited}")
    more = f"\n  and {len(waits) - _MAX_RANKS_SHOWN} more ranks wait" if len(waits) > _MAX_RANKS_SHOWN else ""
    deadlock = "no rank can go on\n  " + "\n  ".join(waits[:_MAX_RANKS_SHOWN]) + more
    for rank, step in heads:  # computes that could run now, were they not behind waiting ones
        for later in range(step + 1, len(row_effects[rank])):
            e, action = row_effects[rank][later], actions[rank][later]
            if isinstance(action, Compute) and not lacks(rank, later) and held[rank].issuperset(_rank_local_values(e.reads)):
                head = actions[rank][step]
                yield f"{deadlock}\nwrite {action} of rank {rank}, at step {later}, before {head} at step {step}: it can run"
                return
    yield deadlock


def _rank_local_values(values: Iterable[Value]) -> list[Value]:
    return [v for v in values if v.name not in _LINK_VALUES]


def _explain_missing_value(row: Sequence[Action], row_effects: Sequence[Effects], step: int, value: Value) -> str:
    """Describe a value that a rank does not hold at a step, why not, and the remedy."""
    freed = [i for i in range(step) if value in row_effects[i].frees]
    later = [i for i in range(step + 1, len(row)) if value in (*row_effects[i].writes, *row_effects[i].adds)]
    if later:
        return f"{value}, which only {row[later[0]]} at step {later[0]} makes; write {row[later[0]]} before it"
    if freed:
        release, remedy = row[freed[-1]], "leave one of them out"
        if isinstance(release, Manage) and (word := _UNDO.get(release.op)):
            remedy = f"write {release.stage}{word}{'' if release.microbatch is None else release.microbatch} between them"
        return f"{value}, which {release} at step {freed[-1]} freed; {remedy}"
    return f"{value}, which no action of this rank makes; leave {row[step]} out, or write before it what makes that"
