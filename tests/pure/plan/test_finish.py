"""Steps that are gone on with: what ranks keep, the rest of a program and its proof, by enumeration over schedules and sizes; which side a
rank may write, against all orders in which ranks come to their moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import pytest

from shardwise.errors import ProgramError, UsageError
from shardwise.plan.ir.check import check, final_contents
from shardwise.plan.ir.program import Compute, ComputeOp, Program, Value
from shardwise.plan.ir.step_remainder import (
    INPUT_GRADIENT_OPS,
    WEIGHT_GRADIENT_OPS,
    GradientSubset,
    min_snapshot_spacing,
    remaining_program,
    snapshot_microbatches,
    snapshot_step,
    snapshot_step_ranges,
    writable_buffer,
)
from shardwise.schedules import NAMES, build

T = TypeVar("T")
SIZES = [(name, stages, count) for name in NAMES for stages in (1, 2, 3, 4) for count in (1, 2, 3, 5, 8)]


def programs() -> list[Program]:
    found = []
    for name, stages, count in SIZES:
        for chunks in (1, 2):
            try:
                found.append(build(name, stages * chunks, count, rendezvous=chunks == 2, chunks=chunks))
            except UsageError:
                continue
    return found


def adds_of(row: Sequence[object], stage: int, ops: frozenset[ComputeOp]) -> list[int]:
    return [a.microbatch for a in row if isinstance(a, Compute) and a.stage == stage and a.op in ops]


def possible(program: Program) -> list[int]:
    """The numbers of microbatches after which every stage of every rank has a moment."""
    ranks = []
    for row, stages in zip(program.actions, program.stages_of, strict=True):
        parts = {
            GradientSubset(frozenset({s}), ops) for s in stages for ops in (INPUT_GRADIENT_OPS, WEIGHT_GRADIENT_OPS) if adds_of(row, s, ops)
        }
        ranks.append(set(snapshot_step_ranges(row, parts, len(program.microbatches))))
    return sorted(set[int].intersection(*ranks))


def test_every_schedule_can_be_gone_on_with_and_adds_up_in_the_same_order() -> None:
    done = Counter[str]()
    for program in programs():
        for k in possible(program):
            rest = remaining_program(program, k)
            for before, after, held in zip(program.actions, rest.actions, rest.initial, strict=True):
                for s in {a.stage for a in before if isinstance(a, Compute)}:
                    for ops in (INPUT_GRADIENT_OPS, WEIGHT_GRADIENT_OPS, frozenset({ComputeOp.F})):
                        whole, left = adds_of(before, s, ops), adds_of(after, s, ops)
                        kept = whole[: len(whole) - len(left)]
                        assert kept + left == whole
                        assert max(kept) < k <= min(left)
                        if ops is WEIGHT_GRADIENT_OPS:
                            assert held[Value("dw", (s,))] == Counter(kept)
            done[program.name] += 1
    assert set(done) == set(NAMES)
    assert all(count >= 10 for name, count in done.items() if name != "gems-mast")  # of which most stages have one microbatch


@pytest.mark.parametrize("name", ["sequential", "gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_the_rest_is_the_schedule_of_fewer_microbatches(name: str) -> None:
    for stages in (1, 2, 3, 4):
        program = build(name, stages, 9)
        for k in range(1, 9):
            fewer = build(name, stages, 9 - k)
            moved = [[a._replace(microbatch=a.microbatch + k) for a in row if isinstance(a, Compute)] for row in fewer.actions]
            left = [[a for a in row if isinstance(a, Compute)] for row in remaining_program(program, k).actions]
            assert left == moved or (name == "zb-h2" and 9 - k < 2 * stages - 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "chimera"])
def test_the_proof_refutes_what_counts_a_microbatch_twice_or_never(name: str) -> None:
    program = build(name, 2, 8)
    rest = remaining_program(program, 4)
    for rank, held in enumerate(rest.initial):
        for value, content in held.items():
            for twin, reason in ((dict(content) | {4 + min(content): 1}, "twice"), (dict(list(content.items())[1:]), "lacks")):
                initial = tuple({**given, value: twin} if r == rank else given for r, given in enumerate(rest.initial))
                with pytest.raises(ProgramError, match=reason):
                    check(replace(rest, initial=initial))
    dropped = tuple(tuple(a for a in row if not (isinstance(a, Compute) and a.microbatch == 5)) for row in rest.actions)
    with pytest.raises(ProgramError):
        check(replace(rest, actions=dropped))


def test_gradients_that_never_hold_the_first_microbatches_alone_are_not_gone_on_from() -> None:
    backwards = Program.parse("0F0 0F1 0F2 0B2 0B1 0B0")
    assert snapshot_step(backwards.actions[0], GradientSubset(frozenset({0}), WEIGHT_GRADIENT_OPS), 1) is None
    with pytest.raises(ProgramError, match="never hold just the microbatches below 1"):
        remaining_program(backwards, 1)
    with pytest.raises(ProgramError, match="summed before microbatch 2"):
        remaining_program(Program.parse("0F0 0F1 0B0 0REDUCE_GRAD 0B1 0F2 0B2 0REDUCE_GRAD"), 2)


def test_a_moment_has_what_the_checker_says_of_the_program_so_far() -> None:
    """Against `final_contents`, of a program cut behind the moment of each rank that computes alone."""
    for name in ("sequential", "gpipe", "1f1b", "zb-h1"):
        program = build(name, 1, 6)
        for k in range(1, 6):
            at = snapshot_step(program.actions[0], GradientSubset(frozenset({0}), WEIGHT_GRADIENT_OPS), k)
            assert at is not None
            so_far = replace(program, actions=(program.actions[0][: at + 1],))
            assert final_contents(so_far)[0][Value("dw", (0,))] == dict.fromkeys(range(k), 1)


def test_copies_of_two_numbers_of_microbatches_do_not_meet() -> None:
    for program in programs():
        for row, stages in zip(program.actions, program.stages_of, strict=True):
            found = snapshot_step_ranges(
                row,
                {
                    GradientSubset(frozenset({s}), ops)
                    for s in stages
                    for ops in (INPUT_GRADIENT_OPS, WEIGHT_GRADIENT_OPS)
                    if adds_of(row, s, ops)
                },
                9,
            )
            chosen = snapshot_microbatches(found, min_snapshot_spacing(found))
            assert all(found[k][1] < found[other][0] for k, other in pairwise(chosen))


@pytest.mark.parametrize("careless", [False, True])
def test_what_all_ranks_have_is_never_lost(careless: bool) -> None:
    """A model of the sides: ranks begin and end their copies in any order. The broken twin always writes the older side."""
    moments, nothing = 4, -1
    todo = [(((0, 0), (0, 0)), (0, 0), (nothing, nothing), 0)]  # marks, halves of copies done, the sides under way, the newest of all
    seen, ends, lost = set(), set(), False
    while todo:
        marks, at, sides, best = state = todo.pop()
        if state in seen:
            continue
        seen.add(state)
        common = max(set(marks[0]).intersection(marks[1]), default=0)
        lost = lost or common < best
        if min(at) == 2 * moments:
            ends.add(common)
        for rank in range(2):
            if at[rank] == 2 * moments:
                continue
            pair, side = list(marks[rank]), sides[rank]
            if at[rank] % 2 == 0:
                found = pair.index(min(pair)) if careless else writable_buffer(marks, rank, 0)
                side = nothing if found is None else found
            if side != nothing:
                pair[side] = 0 if at[rank] % 2 == 0 else at[rank] // 2 + 1
            todo.append((put(marks, rank, (pair[0], pair[1])), put(at, rank, at[rank] + 1), put(sides, rank, side), max(best, common)))
    assert lost is careless
    assert careless or min(ends) >= 1


def put(pair: tuple[T, T], at: int, value: T) -> tuple[T, T]:
    return (value, pair[1]) if at == 0 else (pair[0], value)
