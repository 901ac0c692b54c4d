"""Schedules: orders, proofs, counts of microbatches in flight, and which orders run where a send waits for its receive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ProgramError, UsageError
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Action, Compute, ComputeOp, Links, Program, Recv, Send, Value, chain_links
from shardwise.schedules import NAMES, build
from shardwise.schedules.lower import pipeline_program
from shardwise.simulate.memory import in_flight
from tests.support.closed_forms import BOTH_WAYS
from tests.support.schedule_sizes import fit

SIZES = [(1, 1), (1, 5), (2, 1), (2, 2), (3, 3), (4, 3), (4, 8), (8, 3), (8, 32)]


def u_net(num_stages: int) -> Links:
    """A chain, and skips from each stage of the first half to its mirror image."""
    return tuple(sorted({*chain_links(num_stages), *((s, num_stages - 1 - s) for s in range(num_stages // 2))}))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_schedule_is_proven(name: str, p: int, m: int) -> None:
    stages, m = fit(name, p, m)
    check(build(name, stages, m))
    check(build(name, stages, m, u_net(stages)))


@given(st.sampled_from(NAMES), st.integers(1, 7), st.integers(1, 7), st.data())
def test_every_schedule_is_proven_on_any_links_and_under_rendezvous(name: str, p: int, m: int, data: st.DataObject) -> None:
    p, m = fit(name, p, m)
    pairs = [(a, b) for b in range(p) for a in range(b)]
    links = tuple(sorted(data.draw(st.sets(st.sampled_from(pairs))))) if pairs else ()
    check(build(name, p, m, links))
    in_time = build(name, p, m, links, rendezvous=True)
    check(in_time, rendezvous=True)
    check(in_time)


@pytest.mark.parametrize("links", [chain_links, u_net])
def test_which_schedules_run_under_rendezvous_without_a_change(links: Callable[[int], Links]) -> None:
    """Sends into the direction of travel only: sequential and gpipe. 1f1b sends both ways at once and needs the change."""
    for p, m in SIZES:
        for name in ("sequential", "gpipe"):
            program = build(name, p, m, links(p))
            check(program, rendezvous=True)
            assert build(name, p, m, links(p), rendezvous=True) == program
    with pytest.raises(
        ProgramError, match=r"rank 0 step 3: x\(0,1,1\)>1 waits for rank 1 to receive it; rank 1 is at step 3: g\(1,0,0\)>0"
    ):
        check(build("1f1b", 2, 2), rendezvous=True)


def test_rendezvous_moves_receives_and_nothing_else() -> None:
    def others(program: Program) -> list[list[str]]:
        return [[str(a) for a in row if not isinstance(a, Recv)] for row in program.actions]

    assert others(build("1f1b", 4, 8)) == others(build("1f1b", 4, 8, rendezvous=True))


def test_rendezvous_cannot_help_a_program_that_never_runs() -> None:
    rows = [[Compute(ComputeOp.B, 0, 0), Compute(ComputeOp.F, 0, 0)], [Compute(ComputeOp.F, 1, 0), Compute(ComputeOp.B, 1, 0)]]
    with pytest.raises(ProgramError, match="no rank can move"):
        pipeline_program("backward first", rows, rendezvous=True)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_microbatches_in_flight(p: int, m: int) -> None:
    assert in_flight(build("gpipe", p, m)) == (m,) * p
    assert in_flight(build("1f1b", p, m)) == tuple(min(p - rank, m) for rank in range(p))
    assert in_flight(build("sequential", p, m)) == (1,) * p


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_numbers_of_actions(name: str, p: int, m: int) -> None:
    """Every stage runs every microbatch, wherever; link values cross where two stages are on two ranks; gradients of replicas both ways."""
    stages, m = fit(name, p, m)
    program = build(name, stages, m)
    actions = [a for row in program.actions for a in row]
    assert sum(isinstance(a, Compute) for a in actions) == (3 if name.startswith("zb") else 2) * stages * m
    sent = 2 * (stages - 1 - (name == "zb-v")) * m + (2 * (p - p % 2) if name in BOTH_WAYS else 0)
    assert sum(isinstance(a, Send) for a in actions) == sum(isinstance(a, Recv) for a in actions) == sent


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_accumulated_in_the_serial_order(name: str) -> None:
    """So that sums round as in one process; of two replicas each has its own in order."""
    stages, m = fit(name, 4, 6)
    for row in build(name, stages, m).actions:
        added: dict[tuple[int, int], list[int]] = {}
        for a in row:
            if isinstance(a, Compute) and a.op in (ComputeOp.B, ComputeOp.W):
                added.setdefault((a.stage, a.microbatch % 2 if name in BOTH_WAYS else 0), []).append(a.microbatch)
        assert all(each == sorted(each) for each in added.values())


def edit(program: Program, rank: int, row: Sequence[Action]) -> Program:
    return replace(program, actions=tuple(tuple(row) if r == rank else old for r, old in enumerate(program.actions)))


def last_of_stage_0(program: Program) -> tuple[int, Compute]:
    """(its step on rank 0, the last compute there that adds to stage 0's gradient)."""
    found = [
        (i, a) for i, a in enumerate(program.actions[0]) if isinstance(a, Compute) and a.stage == 0 and a.op in (ComputeOp.B, ComputeOp.W)
    ]
    return found[-1]


@pytest.mark.parametrize("name", NAMES)
def test_broken_twins_of_every_schedule(name: str) -> None:
    """A lost microbatch, a doubled gradient, a freed value that is read again."""
    program = build(name, *fit(name, 4, 8))
    check(program)
    row = program.actions[0]
    step, last = last_of_stage_0(program)
    lost = rf"wanted dw\(0\) lacks contribution {last.microbatch}"
    if name == "gems-mast":  # the replica's only one, so that there is nothing to exchange
        lost = r"rank 0 step 3: dw\(0\)>3 reads dw\(0\), which is not held"
    with pytest.raises(ProgramError, match=lost):
        check(edit(program, 0, [*row[:step], *row[step + 1 :]]))
    with pytest.raises(ProgramError, match=rf"rank 0 step {step + 1}: {last} reads .*, which is not held: {last} at step {step} freed it"):
        check(edit(program, 0, [*row[: step + 1], *row[step:]]))
    with pytest.raises(ProgramError, match=r"wanted dw\(0\) has contribution 0 twice"):
        check(replace(program, initial=({Value("dw", (0,)): {0: 1}}, *program.initial[1:])))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sequential"])
def test_broken_twins_of_every_schedule_that_deadlock_where_sends_wait(name: str) -> None:
    """As they are; of gpipe and breadth-first (one chunk), whose sends all go one way at a time, with two receives the other way round."""
    program = build(name, *fit(name, 4, 8))
    if name in ("gpipe", "breadth-first"):
        first, compute, send, second, *rest = program.actions[1]
        program = edit(program, 1, [second, first, compute, send, *rest])
    check(program)
    with pytest.raises(ProgramError, match=r"no rank can move, where a send waits for its receive\n  rank \d step \d+: "):
        check(program, rendezvous=True)
    check(build(name, *fit(name, 4, 8), rendezvous=True), rendezvous=True)


def test_one_f_one_b_by_hand() -> None:
    computes = [" ".join(str(a) for a in row if isinstance(a, Compute)) for row in build("1f1b", 3, 4).actions]
    assert computes == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_parallel_branches_hold_no_more_than_their_way_to_the_end() -> None:
    """Stages 0 and 1 both feed 2: two encoders need two microbatches each, not three and two."""
    assert in_flight(build("1f1b", 3, 6, ((0, 2), (1, 2)))) == (2, 2, 1)


def test_several_stages_on_a_rank_keep_their_values_there() -> None:
    rows = [
        [Compute(ComputeOp.F, 0, 0), Compute(ComputeOp.F, 1, 0), Compute(ComputeOp.B, 1, 0), Compute(ComputeOp.B, 0, 0)],
        [Compute(ComputeOp.F, 2, 0), Compute(ComputeOp.B, 2, 0)],
    ]
    program = pipeline_program("two and one", rows)
    check(program)
    assert str(program).splitlines()[1] == "rank 0: 0F0 1F0 x(1,2,0)>1 g(2,1,0)<1 1B0 0B0"


def test_two_replicas_in_opposite_directions_are_proven_and_without_their_exchange_refused() -> None:
    """Each stage on two ranks, each microbatch on one of them; then each stage's two sums are exchanged and added."""
    rows = [[Compute(op, stage, m) for m, stage in ((0, rank), (1, 1 - rank)) for op in (ComputeOp.F, ComputeOp.B)] for rank in range(2)]
    program = pipeline_program("both ways", rows)
    check(program)
    without = replace(program, actions=tuple(tuple(a for a in row if "dw" not in str(a)) for row in program.actions))
    with pytest.raises(ProgramError, match="lacks contribution 1"):
        check(without)


def test_a_stage_and_microbatch_on_two_ranks_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"saved\(0,0\) is made on ranks 0 and 1; 0F0 is one too many"):
        pipeline_program("twice", [[Compute(ComputeOp.F, 0, 0)], [Compute(ComputeOp.F, 0, 0)]])


def test_a_name_or_size_that_is_wrong_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown schedule gpip .did you mean gpipe"):
        build("gpip", 2, 2)
    with pytest.raises(UsageError, match="0 stages and 2 microbatches"):
        build("gpipe", 0, 2)
    with pytest.raises(UsageError, match="2 stages and 0 microbatches"):
        build("1f1b", 2, 0)
