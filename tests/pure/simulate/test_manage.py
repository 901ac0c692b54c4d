"""Managing what is held: weights gathered and let go, gradients reduced, what was saved copied to the host, dropped and computed again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import Manage, ManageOp, parse_action
from shardwise.plan.ir.check import check, final_contents
from shardwise.plan.ir.program import Compute, Program, Recv, Send, Value, effects_of
from shardwise.schedules import NAMES, build
from shardwise.schedules.lower import gather_weights, offload, recompute, reduce_gradients
from shardwise.simulate.clock import simulate
from shardwise.simulate.memory import in_flight, peak_memory
from tests.support.schedule_sizes import fit

SHARDED = "rank 0: 0UNSHARD 0F0 0F1 0B0 0REDUCE_GRAD 0B1 0RESHARD 0REDUCE_GRAD"
OUT_OF_CORE = "rank 0: 0F0 0OFFLOAD0 1F0 1DROP0 1R0 1B0 0LOAD0 0B0"


@pytest.mark.parametrize("text", ["0UNSHARD", "12RESHARD", "3REDUCE_GRAD", "0OFFLOAD1", "10LOAD2", "0DROP0", "0R1"])
def test_an_action_reads_as_it_prints(text: str) -> None:
    assert str(parse_action(text)) == text


@pytest.mark.parametrize("text", ["0UNSHARD1", "0OFFLOAD", "0REDUCE_GRAD0", "0DROP"])
def test_an_op_of_a_stage_has_no_microbatch_and_another_has_one(text: str) -> None:
    with pytest.raises(ProgramError, match=r"is not an action: .* is of a"):
        parse_action(text)


@pytest.mark.parametrize("text", [SHARDED, OUT_OF_CORE])
def test_a_program_reads_as_it_prints_and_checks(text: str) -> None:
    program = Program.parse(text)
    assert Program.parse(str(program)) == program
    check(program)


def test_what_is_reduced_is_wanted_reduced_and_adds_up() -> None:
    program = Program.parse(SHARDED)
    assert program.wants == ({Value("grad", (0,)): {0: 1, 1: 1}},)
    assert final_contents(program) == program.wants


@pytest.mark.parametrize(
    ("text", "old", "new", "reason"),
    [
        (SHARDED, " 0REDUCE_GRAD 0B1", " 0B1 0REDUCE_GRAD", r"step 7: 0REDUCE_GRAD reads dw\(0\), .*0REDUCE_GRAD at step 5 freed it"),
        (SHARDED, "0RESHARD 0REDUCE_GRAD", "0RESHARD", r"wanted grad\(0\) lacks contribution 1"),
        (SHARDED, "0B1 0RESHARD", "0RESHARD 0B1", r"0B1 reads w\(0\), .*0RESHARD at step 5 freed it"),
        (SHARDED, "0UNSHARD", "0UNSHARD 0UNSHARD", r"step 1: 0UNSHARD makes w\(0\), which is held already"),
        (SHARDED, "0RESHARD", "0RESHARD 0RESHARD", r"0RESHARD reads w\(0\)"),
        (OUT_OF_CORE, "0LOAD0 0B0", "0B0 0LOAD0", r"0B0 reads saved\(0,0\), .*it comes only at step 8 with 0LOAD0|0B0 reads saved\(0,0\)"),
        (OUT_OF_CORE, "1R0 ", "", r"1B0 reads saved\(1,0\), .*1DROP0 at step 3 freed it"),
        (OUT_OF_CORE, "1DROP0", "1DROP0 1DROP0", r"1DROP0 reads saved\(1,0\)"),
        (OUT_OF_CORE, "0LOAD0", "0LOAD0 0LOAD0", r"0LOAD0 reads host\(0,0\), .*0LOAD0 at step 6 freed it"),
        (OUT_OF_CORE, "1F0 1DROP0 1R0", "1F0 1R0", r"1R0 reads inputs\(1,0\), .*no action of this rank makes"),
    ],
)
def test_a_broken_twin_is_named(text: str, old: str, new: str, reason: str) -> None:
    assert text.count(old) == 1
    with pytest.raises(ProgramError, match=reason):
        check(Program.parse(text.replace(old, new)))


def test_only_stages_that_are_gathered_need_their_weights() -> None:
    program = Program.parse("rank 0: 0UNSHARD 0F0 1F0 1B0 0B0 0RESHARD")
    check(program)
    assert program.gathered_stages == {0}
    assert effects_of(parse_action("1F0"), program).reads == (Value("x", (0, 1, 0)),)


def test_what_is_on_the_host_takes_no_memory_of_the_device() -> None:
    """Two stages of one rank, saved 10 each, inputs of a dropped stage 2: offloading and dropping keep at most one whole."""
    sizes = {"saved": 10.0, "inputs": 2.0}
    kept = peak_memory(Program.parse("rank 0: 0F0 1F0 1B0 0B0"), lambda value: sizes.get(value.name, 0.0))
    less = peak_memory(Program.parse(OUT_OF_CORE), lambda value: sizes.get(value.name, 0.0))
    assert (kept[0].size_bytes, less[0].size_bytes) == (20.0, 10.0)
    assert in_flight(Program.parse(OUT_OF_CORE)) == (1,)


def seconds(text: str, **takes: float) -> dict[str, tuple[float, float]]:
    found = simulate(Program.parse(text), lambda a: 1.0, lambda *_: 0.0, manage_s=lambda a: takes[a.op])
    return {span.name: (span.start_s, span.end_s) for span in found.spans}


def test_weights_come_while_the_rank_computes_and_the_compute_waits_for_them() -> None:
    found = seconds("rank 0: 0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0", UNSHARD=3.0)
    assert found["1UNSHARD"] == (3, 6)
    assert (found["0F0"], found["1F0"], found["0B0"]) == ((3, 4), (6, 7), (8, 9))


def test_a_load_waits_for_its_offload_and_lanes_run_beside_one_another() -> None:
    found = seconds("rank 0: 0F0 0OFFLOAD0 1F0 0LOAD0 1B0 0B0", OFFLOAD=4.0, LOAD=2.0)
    assert found["0OFFLOAD0"] == (1, 5)
    assert found["0LOAD0"] == (5, 7)
    assert (found["1B0"], found["0B0"]) == ((2, 3), (7, 8))


@pytest.mark.parametrize(("beside", "ends"), [(True, (2, 22, 23)), (False, (12, 23, 24))])
def test_a_rank_that_copies_itself_computes_nothing_meanwhile(beside: bool, ends: tuple[float, ...]) -> None:
    """F0 until 1, the copy until 11, and back in 10 more; F1 between them, or beside them."""
    program = Program.parse("rank 0: 0F0 0OFFLOAD0 0F1 0LOAD0 0B0 0B1")
    found = simulate(program, lambda a: 1.0, lambda *_: 0.0, manage_s=lambda a: 10.0, copies_overlap=beside)
    at = {span.name: span.end_s for span in found.spans}
    assert (at["0F1"], at["0B0"], at["0B1"]) == ends


def test_reductions_follow_one_another_beside_the_compute() -> None:
    found = seconds("rank 0: 0F0 1F0 1B0 1REDUCE_GRAD 0B0 0REDUCE_GRAD", REDUCE_GRAD=5.0)
    assert (found["1REDUCE_GRAD"], found["0B0"], found["0REDUCE_GRAD"]) == ((3, 8), (3, 4), (8, 13))


LANE_OF = {"UNSHARD": "c", "REDUCE_GRAD": "c", "OFFLOAD": "o", "LOAD": "l"}


def longest_path_s(program: Program, seconds: dict[str, float]) -> float:
    """The end of all, over a graph of events that is built without the clock: what is posted, what a rank waits for, what a lane does."""
    ends: dict[tuple[int, int], float] = {}  # (rank, step) -> when its result is there
    passed: dict[tuple[int, int], float] = {}  # (rank, step) -> when its rank goes on

    def made_before(rank: int, step: int, value: Value) -> float:
        makers = [i for i in range(step) if value in (*(e := effects_of(program.actions[rank][i], program)).writes, *e.adds)]
        return end(rank, makers[-1]) if makers else 0.0

    def end(rank: int, step: int) -> float:
        if (rank, step) not in ends:
            row = program.actions[rank]
            action, before = row[step], passed_at(rank, step - 1)
            lane = LANE_OF.get(str(getattr(action, "op", "")))
            waits = [before, *[made_before(rank, step, value) for value in effects_of(action, program).reads]]
            if isinstance(action, Recv):
                there = program.actions[action.source]
                waits = [before, end(action.source, there.index(Send(action.value, rank)))]
            elif isinstance(action, Send):
                waits += [end(rank, i) for i in range(step) if isinstance(row[i], Send) and row[i].to == action.to]
            elif lane:
                waits += [end(rank, i) for i in range(step) if LANE_OF.get(str(getattr(row[i], "op", ""))) == lane]
            ends[rank, step] = max(waits) + seconds.get(str(action), 0.0)
        return ends[rank, step]

    def passed_at(rank: int, step: int) -> float:
        if step < 0:
            return 0.0
        if (rank, step) not in passed:
            posted = isinstance(program.actions[rank][step], (Manage, Send))
            passed[rank, step] = passed_at(rank, step - 1) if posted else end(rank, step)
        return passed[rank, step]

    return max(end(rank, step) for rank, row in enumerate(program.actions) for step in range(len(row)))


@given(st.sampled_from(NAMES), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2**32))
def test_random_times_on_every_lane_equal_the_longest_path(name: str, p: int, m: int, ahead: int, seed: int) -> None:
    stages, m = fit(name, p, m)
    rng = random.Random(seed)
    program = build(name, stages, m)
    kept = sorted({(a.stage, a.microbatch) for row in program.actions for a in row if isinstance(a, Compute)})
    program = offload(program, rng.sample(kept, len(kept) // 2), ahead)
    program = recompute(program, [key for key in kept if f"{key[0]}OFFLOAD{key[1]}" not in str(program)][::2], ahead)
    program = reduce_gradients(gather_weights(program, ahead), rng.random() < 0.5)
    check(program)
    takes = {str(a): rng.random() for row in program.actions for a in row if not isinstance(a, Recv)}
    for free in ("RESHARD", "DROP"):
        takes.update((text, 0.0) for text in takes if free in text)
    found = simulate(
        program, lambda a: takes[str(a)], lambda value, source, to: takes[str(Send(value, to))], manage_s=lambda a: takes[str(a)]
    )
    assert found.end_s == pytest.approx(longest_path_s(program, takes))


def test_an_action_of_manage_is_of_what_it_says() -> None:
    assert Manage(ManageOp.OFFLOAD, 1, 2) == parse_action("1OFFLOAD2")
    with pytest.raises(ProgramError, match="5UNSHARD is not of the stages 0 to 0"):
        Program.parse("stages 1\nrank 0: 0F0 5UNSHARD")
