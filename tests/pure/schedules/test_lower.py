"""Lowering passes: what they add stays proven on any schedule, in the right place, and each has a twin that is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ProgramError, UsageError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Action, Compute, ComputeOp, Manage, ManageOp, Program, Recv, Send, Value
from shardwise.schedules import NAMES, build
from shardwise.schedules.lower import complete_with_transfers, gather_weights, offload, recompute, reduce_gradients, split_backward
from shardwise.simulate.clock import simulate
from shardwise.simulate.memory import in_flight, peak_memory
from tests.support.schedule_sizes import fit


@st.composite
def programs(draw: st.DrawFn) -> Program:
    name = draw(st.sampled_from(NAMES))
    stages, m = fit(name, draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    return build(name, stages, m, rendezvous=draw(st.booleans()))


def bare(program: Program) -> Program:
    return replace(program, actions=tuple(tuple(a for a in row if isinstance(a, Compute)) for row in program.actions))


def count(program: Program, op: ManageOp | ComputeOp) -> int:
    return sum(isinstance(a, (Compute, Manage)) and a.op is op for row in program.actions for a in row)


def texts(program: Program, rank: int = 0) -> str:
    return " ".join(map(str, program.actions[rank]))


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 5))
def test_computes_alone_are_completed_to_the_schedules_own_program(name: str, p: int, m: int) -> None:
    stages, m = fit(name, p, m)
    program = build(name, stages, m)
    text = "\n".join(" ".join(map(str, row)) for row in bare(program).actions)
    assert complete_with_transfers(replace(Program.parse(text), name=name)) == program
    assert complete_with_transfers(program) == program


def test_a_file_as_others_write_it_has_commas_and_no_names() -> None:
    program = complete_with_transfers(Program.parse("0F0,0F1,0I0,0W0,,0I1,0W1\n1F0, 1F1, 1B0, 1B1 # the last\n"))
    check(program)
    assert texts(program, 1) == "x(0,1,0)<0 1F0 x(0,1,1)<0 1F1 1B0 g(1,0,0)>0 1B1 g(1,0,1)>0"
    with pytest.raises(ProgramError, match="1 lines begin with `rank N:` and 1 lines of actions do not; number all or none"):
        Program.parse("rank 0: 0F0\n1F0")


@given(programs(), st.integers(0, 3))
def test_split_backward_is_proven_on_every_schedule(program: Program, lag: int) -> None:
    split = replace(program, actions=tuple(tuple(split_backward(row, lag)) for row in bare(program).actions))
    split = complete_with_transfers(split)
    check(split)
    assert count(split, ComputeOp.B) == 0
    assert count(split, ComputeOp.I) == count(split, ComputeOp.W) == count(program, ComputeOp.F)


def test_split_backward_of_a_whole_program_lets_others_go_on_first() -> None:
    """The gradient is sent between the input part and the weights part."""
    row = split_backward(build("1f1b", 2, 2).actions[1])
    assert " ".join(map(str, row)) == "x(0,1,0)<0 1F0 1I0 g(1,0,0)>0 1W0 x(0,1,1)<0 1F1 1I1 g(1,0,1)>0 1W1"


@given(programs(), st.integers(0, 3))
def test_weights_are_gathered_before_each_run_and_let_go_after(program: Program, ahead: int) -> None:
    gathered = gather_weights(program, ahead)
    check(gathered)
    assert count(gathered, ManageOp.UNSHARD) == count(gathered, ManageOp.RESHARD)
    assert without_manage(gathered) == program.actions
    held = peak_memory(gathered, lambda value: float(value.name == "w"))
    assert all(p.size_bytes <= 1 + ahead for p in held)


def without_manage(program: Program) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(a for a in row if not isinstance(a, Manage)) for row in program.actions)


def test_gathering_ahead_hides_behind_the_compute_before() -> None:
    program = Program.parse("rank 0: 0F0 1F0 2F0 2B0 1B0 0B0")
    seconds = [simulate(gather_weights(program, ahead), lambda a: 2.0, lambda *_: 0.0, manage_s=lambda a: 1.0).total_s for ahead in (0, 1)]
    # Five gatherings for stages 0, 1, 2, 1, 0: all but the first are hidden.
    assert seconds == [12 + 5, 12 + 1]


def test_only_chosen_stages_are_gathered() -> None:
    assert texts(gather_weights(Program.parse("rank 0: 0F0 1F0 1B0 0B0"), 0, {1})) == "0F0 1UNSHARD 1F0 1B0 1RESHARD 0B0"


@given(programs(), st.booleans())
def test_gradients_are_reduced_as_early_as_they_are_complete(program: Program, every: bool) -> None:
    reduced = reduce_gradients(program, every)
    check(reduced)
    assert {value.name for held in reduced.wants for value in held} == {"grad"}
    for row in reduced.actions:
        for step, action in enumerate(row):
            if isinstance(action, Manage):
                before = row[step - 1]
                stage = before.stage if isinstance(before, (Compute, Manage)) else before.value.index[0]
                assert stage == action.stage or isinstance(before, Manage)
    held = peak_memory(reduced, lambda value: float(value.name == "dw"))
    for rank, row in enumerate(reduced.actions):
        backwards = sum(isinstance(a, Compute) and a.op in (ComputeOp.B, ComputeOp.W) for a in row)
        reductions = sum(isinstance(a, Manage) for a in row)
        if every and not any(isinstance(a, Recv) and a.value.name == "dw" for a in row):
            assert (held[rank].size_bytes, reductions) == (1, backwards)
        else:
            assert reductions == len(program.stages_of[rank])


def every_kept(program: Program) -> set[tuple[int, int]]:
    return {(a.stage, a.microbatch) for row in program.actions for a in row if isinstance(a, Compute) and a.op is ComputeOp.F}


@given(programs(), st.integers(0, 3), st.data())
def test_offload_and_recomputation_are_proven_on_every_schedule(program: Program, ahead: int, data: st.DataObject) -> None:
    kept = sorted(every_kept(program))
    first = data.draw(st.sets(st.sampled_from(kept)))
    second = data.draw(st.sets(st.sampled_from(kept))) - first
    both = recompute(offload(program, first, ahead), second, ahead)
    check(both)
    assert count(both, ManageOp.OFFLOAD) == count(both, ManageOp.LOAD) <= len(first)
    assert count(both, ManageOp.DROP) == count(both, ComputeOp.R) <= len(second)
    assert all(a <= b for a, b in zip(in_flight(both), in_flight(program), strict=True))


@given(st.integers(2, 5), st.integers(2, 8))
def test_offload_of_everything_leaves_what_is_in_use(p: int, m: int) -> None:
    """GPipe holds m microbatches a rank; with all offloaded, what runs and what is loaded ahead."""
    program = build("gpipe", p, m)
    for ahead in (0, 1):
        assert max(in_flight(offload(program, every_kept(program), ahead))) <= 1 + ahead


def test_offload_hides_behind_compute_where_there_is_enough() -> None:
    """Five stages on one rank, a copy takes one forward: the last copy goes out while the last stage computes, each comes back ahead."""
    program = Program.parse("rank 0: 0F0 1F0 2F0 3F0 4F0 4B0 3B0 2B0 1B0 0B0")

    def seconds(copy_s: float, ahead: int = 1) -> float:
        lowered = offload(program, {(0, 0), (1, 0), (2, 0)}, ahead)
        return simulate(lowered, lambda a: 1.0 if a.op is ComputeOp.F else 2.0, lambda *_: 0.0, manage_s=lambda a: copy_s).total_s

    assert seconds(1.0) == 15.0
    assert seconds(1.0, ahead=0) == 18.0
    assert seconds(3.0) > 15.0


def test_recomputation_fills_the_time_that_a_rank_waits_for_a_gradient() -> None:
    """Stage 0 of two computes again while stage 1 runs; its own time is unchanged by that."""
    program = build("gpipe", 2, 2)
    again = recompute(program, {(0, 0)})
    assert texts(again) == "0F0 x(0,1,0)>1 0DROP0 0F1 x(0,1,1)>1 0R0 g(1,0,0)<1 0B0 g(1,0,1)<1 0B1"
    assert simulate(again, lambda a: 1.0, lambda *_: 0.0).total_s == simulate(program, lambda a: 1.0, lambda *_: 0.0).total_s == 6


def test_what_is_needed_at_once_is_left() -> None:
    program = build("1f1b", 2, 2)
    assert offload(program, {(1, 0)}).actions == program.actions


def test_a_stage_and_microbatch_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="1f1b has no forward and backward of stage 2 on microbatch 0"):
        offload(build("1f1b", 2, 2), {(2, 0)})


def test_broken_twins() -> None:
    """A load that is missing, weights let go too early, a reduction before the last backward, an R that never comes."""

    def cut(program: Program, text: str) -> Program:
        return replace(program, actions=tuple(tuple(a for a in row if str(a) != text) for row in program.actions))

    program = build("gpipe", 2, 2)
    with pytest.raises(ProgramError, match=r"rank 0 step \d+: 0B0 reads saved\(0,0\), which is not held: 0OFFLOAD0 at step 2 freed it"):
        check(cut(offload(program, {(0, 0)}), "0LOAD0"))
    with pytest.raises(ProgramError, match=r"rank 0 step \d+: 0B0 reads saved\(0,0\), which is not held: 0DROP0 at step 2 freed it"):
        check(cut(recompute(program, {(0, 0)}), "0R0"))
    with pytest.raises(ProgramError, match=r"rank 0 step 7: 0B0 reads w\(0\), which is not held: 0RESHARD at step 4 freed it"):
        check(_let_go_early(program))
    with pytest.raises(ProgramError, match=r"wanted grad\(0\) lacks contribution 1"):
        check(_reduced_early(program))


def _let_go_early(program: Program) -> Program:
    row = [a for a in gather_weights(program).actions[0] if str(a) != "0RESHARD"]
    at = row.index(Compute(ComputeOp.F, 0, 1)) + 1
    return replace(gather_weights(program), actions=((*row[:at], Manage(ManageOp.RESHARD, 0), *row[at:]), program.actions[1]))


def _reduced_early(program: Program) -> Program:
    reduced = reduce_gradients(program)
    row = [a for a in reduced.actions[0] if not isinstance(a, Manage)]
    at = row.index(Compute(ComputeOp.B, 0, 0)) + 1
    return replace(reduced, actions=((*row[:at], Manage(ManageOp.REDUCE_GRAD, 0), *row[at:]), reduced.actions[1]))


def test_values_that_cross_are_those_of_the_links() -> None:
    program = complete_with_transfers(Program.parse("0UNSHARD 0F0 0B0 0RESHARD\n1UNSHARD 1F0 1B0 1RESHARD"))
    check(program)
    sent = [a.value for row in program.actions for a in row if isinstance(a, Send)]
    assert sent == [Value("x", (0, 1, 0)), Value("g", (1, 0, 0))]


@pytest.mark.parametrize("name", ["chimera", "gems-master"])
@pytest.mark.parametrize("rendezvous", [False, True])
def test_each_rank_of_a_stage_gathers_its_own_weights(name: str, rendezvous: bool) -> None:
    """They never cross, though a stage is on two ranks, and one of both that lets go too often is told so."""
    program = complete_with_transfers(gather_weights(bare(build(name, 4, 4))), rendezvous)
    check(program, rendezvous)
    assert {a.value.name for row in program.actions for a in row if isinstance(a, Send)} == {"x", "g", "dw"}
    with pytest.raises(ProgramError, match=r"rank 0 step 0: 1RESHARD reads w\(1\), which is not held"):
        check(complete_with_transfers(Program.parse("1RESHARD 0F0 0B0\n1UNSHARD 1F0 1B0 1RESHARD"), rendezvous), rendezvous)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0F0 0F0 0B0\n1F0 1B0", r"rank 0 step 2: 0F0 makes saved\(0,0\), which is held already"),
        ("0F0 0B0 0F0\n1F0 1B0", r"rank 0 step 5: x\(0,1,0\)>1 is never received"),
        ("0F0 0B0\n1F0 1B0 1F1", r"rank 1 step 4: 1F1 reads x\(0,1,1\), which is not held"),
    ],
)
def test_what_is_wrong_is_told_alike_where_sends_wait(text: str, reason: str) -> None:
    for rendezvous in (False, True):
        with pytest.raises(ProgramError, match=reason):
            check(complete_with_transfers(Program.parse(text), rendezvous), rendezvous)
